"""Weight-gradient deferral: split a backward into I (input gradients) and W (weight gradients), on plain torch.

A stage runs its forward, and later its backward, inside ``defer_weight_gradients(store, key)``. Inside it, ops with
a parameter operand (linear, matrix products, 1-d to 3-d convolutions, embedding, grouped matrix products) compute
only the gradient of their data operand in the backward and stash (data, output gradient) in the store.
``store.run(key)`` computes the weight gradients afterwards, in one ``torch.autograd.backward``, so that hooks on
parameters and on their accumulation nodes fire as in an ordinary backward. Roughly::

    store = WeightGradientStore()
    with defer_weight_gradients(store, key=(stage, micro_batch)):
        outputs = module(inputs)                              # F
    ...
    with defer_weight_gradients(store, key=(stage, micro_batch)):  # also covers recomputation
        torch.autograd.backward(outputs, output_gradients)    # I
    ...
    store.run((stage, micro_batch))                           # W

Parameters given as ``whole`` are left out. Every other op keeps its whole backward in I, which stays correct: norms,
biases added by hand, fused kernels that take weights as arguments, weights computed from other tensors. Such a
parameter gets its gradient (and fires its hooks) in I; one that is used both ways does so in I and in W.

Whoever feeds the stage must not overwrite its inputs or its output gradients until W has run: they are held by
reference.
"""

from pipeplan.deferral.mode import defer_weight_gradients
from pipeplan.deferral.store import WeightGradientStore, storage_bytes

__all__ = ["WeightGradientStore", "defer_weight_gradients", "storage_bytes"]
