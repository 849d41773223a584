"""The stages of one pipeline rank, whatever the placement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from deepspeed.runtime.utils import set_random_seed
from deepspeed.utils import logger
from torch import nn

from pipeplan.errors import LaunchError, ModelError
from pipeplan.model.splitting import splittable_layers
from pipeplan.program.verify import VerifiedProgram
from pipeplan.runtime.loading import RunnablePlan
from pipeplan.runtime.recompute import recompute
from pipeplan.runtime.startup import load_same_plan
from pipeplan.runtime.tied import TiedWeights, find_tied_keys, get_parameter, share_parameter
from pipeplan.runtime.weighting import MICRO_BATCHES, LossReduction, counter_of

_SEED_STRIDE = 1_000_003  # keeps the seeds of layers apart for neighbouring seeds of the script


class PlannedPipelineModule(PipelineModule):
    """A DeepSpeed pipeline module cut, placed and ordered by a plan; builds only the layers of its rank.

    Each layer takes one value (a tensor or a pytree of tensors) and returns one. Layers are built under a seed of
    their own, derived from torch's current one, so that initial weights don't depend on the plan.

    The plan's profile says which layers' backward is split into I and W (``splittable``), so that a plan runs as it was
    planned. Layers that aren't split compute their weight gradients in I and hold nothing until W. A plan verified in
    this process brings no profile; the layers' own ``is_splittable`` decides then, as in profiling.

    Args:
        layers: ``nn.Module``, ``LayerSpec``, ``TiedLayerSpec``, functions, or layers of ``pipeplan.model``.
        plan: A plan folder, or a plan verified in this process.
        loss_fn: ``loss_fn(outputs, labels)``; without it the last layer returns the loss.
        num_stages: Pipeline ranks; only checked against the plan.
        seed_layers: Seed every layer's forward by micro-batch and layer, so that dropout doesn't depend on the plan.
        dynamic_shapes: Whether micro-batches may differ in shape (sequence length). The structure of a boundary then
            travels with every message; otherwise the first boundary that differs is refused.
        loss_reduction: ``"micro-batches"``, the mean of the micro-batches' means, as DeepSpeed; ``"tokens"``, weighted
            by their labels other than -100; or a function from labels to the count that weighs them.
        reentrant_recompute: Recompute with torch's reentrant checkpoints.

    Raises:
        LaunchError: The ranks hold different plans, or the plan doesn't fit the world.
        ModelError: The plan is for another model: other layer count or names.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        *,
        plan: str | Path | VerifiedProgram | RunnablePlan,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        num_stages: int | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], None] | None = None,
        base_seed: int = 1234,
        dynamic_shapes: bool = False,
        loss_reduction: LossReduction = MICRO_BATCHES,
        reentrant_recompute: bool = False,
        **others: Any,
    ) -> None:
        if others:
            raise LaunchError(
                f"PlannedPipelineModule does not take {', '.join(sorted(others))}: the plan decides partition, "
                "placement and recomputation; delete the argument"
            )
        layers = list(layers)
        runnable = load_same_plan(plan)
        if num_stages is not None and num_stages != runnable.plan.num_ranks:
            raise LaunchError(
                f"num_stages is {num_stages}, but the plan is for {runnable.plan.num_ranks} pipeline ranks; delete it"
            )
        _check_model(layers, runnable)
        # nn.Module takes plain values before its own __init__, and DeepSpeed's calls our overrides, which need them.
        self.runnable = runnable
        self.rank_by_stage = runnable.plan.placement.rank_by_stage
        partition = runnable.plan.partition
        self.layer_indices_by_stage = [partition.layers(stage) for stage in range(partition.num_stages)]
        self.splittable_layers = _splittable_layers(layers, runnable)
        self._is_loading = False
        self.dynamic_shapes = dynamic_shapes
        self.count_labels = counter_of(loss_reduction)
        self.reentrant_recompute = reentrant_recompute
        super().__init__(
            layers,
            topology=PipeDataParallelTopology(
                num_pp=runnable.plan.num_ranks, num_dp=dist.get_world_size() // runnable.plan.num_ranks
            ),
            loss_fn=loss_fn,
            seed_layers=seed_layers,
            seed_fn=seed_fn,
            base_seed=base_seed,
        )
        self.recomputed_stages = frozenset(runnable.plan.recomputed_stages)

    @property
    def hosts_first_stage(self) -> bool:
        """Whether this rank reads the inputs."""
        return self.rank_by_stage[0] == self.stage_id

    @property
    def hosts_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.rank_by_stage[-1] == self.stage_id

    def whole_parameters(self, stage: int) -> frozenset[nn.Parameter]:
        """Return the parameters of a stage of this rank whose gradients are computed in I, not in W.

        A weight that a layer of the stage shares with one that isn't split is among them.
        """
        return frozenset(
            parameter
            for index in self.layer_indices_by_stage[stage]
            if not self.splittable_layers[index] and index in self.module_by_layer
            for parameter in self.module_by_layer[index].parameters()
        )

    def stage_owner(self, layer_idx: int) -> int:
        """Return the pipeline rank that holds a layer."""
        for stage, indices in enumerate(self.layer_indices_by_stage):
            if layer_idx in indices:
                return self.rank_by_stage[stage]
        raise IndexError(f"the model has no layer {layer_idx}")

    def run_stage(self, stage: int, boundary: Any, micro_batch: int, batch: int) -> Any:
        """Run the layers of ``stage`` on what the stage before it handed over.

        Args:
            batch: Number of micro-batches run before this batch; with ``micro_batch`` it seeds dropout.
        """
        # What DeepSpeed's forward() counts up to, call by call; by micro-batch it is the same in any order.
        self.micro_offset = batch + micro_batch + 1
        recomputes = stage in self.recomputed_stages and torch.is_grad_enabled()
        for index, layer in zip(self.layer_indices_by_stage[stage], self.functions_by_stage[stage], strict=True):
            if self.seed_layers:
                layer = partial(self._run_seeded, layer, index, self.micro_offset)
            if recomputes:
                boundary = recompute(layer, boundary, is_reentrant=self.reentrant_recompute)
            else:
                boundary = layer(boundary)
        return boundary

    def _run_seeded(self, layer: Callable[[Any], Any], index: int, micro_offset: int, boundary: Any) -> Any:
        self.curr_layer = index
        (self.seed_fn or set_random_seed)(self.base_seed * (micro_offset + 1) + index)
        return layer(boundary)

    def forward(self, inputs: Any) -> Any:
        """Run the whole model, where this rank holds all of it."""
        if set(self.rank_by_stage) != {self.stage_id}:
            raise LaunchError("this rank holds a part of the model only; use train_batch() or eval_batch()")
        for stage in range(len(self.rank_by_stage)):
            inputs = self.run_stage(stage, inputs, 0, 0)
        return inputs

    # What follows are DeepSpeed's own hooks.

    def _partition_layers(self, method: str = "planned") -> None:
        self.parts = list(self.runnable.plan.partition.bounds)
        self.stages = self.runnable.plan.placement.stages(self.stage_id)
        self._activate(self.stages[0])
        logger.info(
            f"pipeline rank {self.stage_id} holds stages "
            + ", ".join(f"{stage} (layers {self.parts[stage]}-{self.parts[stage + 1] - 1})" for stage in self.stages)
        )

    def _activate(self, stage: int) -> None:
        """Let DeepSpeed's layer-file code see one stage: its bounds and its functions."""
        self._set_bounds(self.parts[stage], self.parts[stage + 1])
        if hasattr(self, "functions_by_stage"):
            self.forward_funcs = self.functions_by_stage[stage]

    def _build(self) -> None:
        self.tied_keys = find_tied_keys(self._layer_specs)
        self.module_by_layer: dict[int, nn.Module] = {}
        self.functions_by_stage: dict[int, list[Callable[[Any], Any]]] = {}
        for stage in self.stages:
            self.functions_by_stage[stage] = [self._build_layer(index) for index in self.layer_indices_by_stage[stage]]
        self._share_tied_parameters()
        self._activate(self.stages[0])
        if not any(parameter.requires_grad for parameter in self.parameters()):
            # Optimizers, ZeRO and gradient norms all refuse a rank without parameters.
            self.register_parameter("placeholder", nn.Parameter(torch.zeros(1)))
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False

    def _build_layer(self, index: int) -> Callable[[Any], Any]:
        layer = self._layer_specs[index]
        if isinstance(layer, nn.Module):
            return self._register(index, layer)
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = self._build_seeded(layer, self._first_layer(layer.key))
                self.tied_weight_attrs[layer.key] = layer.tied_weight_attr
            module = self.tied_modules[layer.key]
            self.module_by_layer[index] = module
            return module if layer.forward_fn is None else partial(layer.forward_fn, module)
        if hasattr(layer, "build"):
            built = self._build_seeded(layer, index)
            return self._register(index, built) if isinstance(built, nn.Module) else built
        return layer

    def _first_layer(self, key: str) -> int:
        return next(tied.first_layer for tied in self.tied_keys if tied.key == key)

    def _register(self, index: int, module: nn.Module) -> nn.Module:
        self.add_module(str(index), module)
        self.module_by_layer[index] = module
        return module

    def _build_seeded(self, layer: Any, index: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            if self.seed_layers:
                (self.seed_fn or set_random_seed)(self.base_seed + index)
            else:
                torch.manual_seed((torch.initial_seed() * _SEED_STRIDE + index) % 2**63)
            return layer.build()

    def _share_tied_parameters(self) -> None:
        """Make the layers of one tied key on this rank share their parameters."""
        for tied in self.tied_keys:
            first: list[nn.Parameter] = []
            for index, names in sorted(tied.attributes_by_layer.items()):
                module = self.module_by_layer.get(index)
                if module is None:
                    continue
                if not first:
                    first = [get_parameter(module, name) for name in names]
                    continue
                for name, parameter in zip(names, first, strict=True):
                    if get_parameter(module, name) is not parameter:
                        share_parameter(module, name, parameter)

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        self.tied_weights: list[TiedWeights] = []
        described: dict[str, dict[str, Any]] = {}
        for tied in self.tied_keys:
            owners = sorted({self.stage_owner(index) for index in tied.attributes_by_layer})
            if len(owners) == 1:
                continue
            first_owner = self.stage_owner(tied.first_layer)
            for replica in range(self._grid.data_parallel_size):
                ranks = [self._grid.stage_to_global(owner, data=replica) for owner in owners]
                group = dist.new_group(ranks=ranks)
                if self.global_rank not in ranks:
                    continue
                index = min(index for index in tied.attributes_by_layer if self.stage_owner(index) == self.stage_id)
                module = self.module_by_layer[index]
                weights = [get_parameter(module, name) for name in tied.attributes_by_layer[index]]
                source = self._grid.stage_to_global(first_owner, data=replica)
                self.tied_weights.append(TiedWeights(weights, ranks, source, group))
                if self.global_rank != source:
                    for weight in weights:
                        weight.ds_pipe_replicated = True  # type: ignore[attr-defined]  # counted once in gradient norms
                # The engine reads these for its log line only.
                described[tied.key] = {"ranks": ranks, "module": nn.ParameterList(weights)}
        return described

    def _synchronize_tied_weights(self) -> None:
        if not self._is_loading:
            for tied in self.tied_weights:
                tied.broadcast()

    def _precompute_checkpointable_values(self) -> None:
        """Nothing to do: the plan says which stages recompute."""

    def save_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Write one layer file for each layer of this rank, as DeepSpeed does."""
        for stage in self.stages:
            self._activate(stage)
            super().save_state_dict(*args, **kwargs)

    def load_state_dir(self, *args: Any, **kwargs: Any) -> None:
        """Read the layer files of this rank's layers."""
        self._is_loading = True  # the stages of a rank are loaded one by one; the exchange below is collective
        try:
            for stage in self.stages:
                self._activate(stage)
                super().load_state_dir(*args, **kwargs)
        finally:
            self._is_loading = False
        self._synchronize_tied_weights()


def _check_model(layers: Sequence[Any], runnable: RunnablePlan) -> None:
    """Check that the script builds the model that the plan is for.

    Raises:
        ModelError: The layer count or a name differs.
    """
    num_planned = runnable.plan.partition.num_layers
    if len(layers) != num_planned:
        raise ModelError(
            f"the script builds {len(layers)} layers, but the plan is for {num_planned} (model "
            f"{runnable.plan.model!r}); profile this model and optimize again"
        )
    if runnable.layer_names is None:
        return
    for index, (layer, planned) in enumerate(zip(layers, runnable.layer_names, strict=True)):
        name = getattr(layer, "name", None)
        if isinstance(name, str) and not isinstance(layer, nn.Module) and name != planned:
            raise ModelError(
                f"layer {index} of the script is {name!r}, but the plan was made for {planned!r} (model "
                f"{runnable.plan.model!r}); profile this model and optimize again"
            )


def _splittable_layers(layers: Sequence[Any], runnable: RunnablePlan) -> tuple[bool, ...]:
    """Return which layers' backward is split: as the plan's profile says, or else as the layers do."""
    wanted = splittable_layers(layers)
    if runnable.profile is None:
        return wanted
    planned = tuple(layer.is_splittable for layer in runnable.profile.layers)
    # the other way round says little: in many layers nothing can be deferred, and the profile knows
    odd = [
        layer.name
        for layer, is_wanted in zip(runnable.profile.layers, wanted, strict=True)
        if layer.is_splittable and not is_wanted
    ]
    if odd and dist.get_rank() == 0:
        logger.info(
            f"the plan's profile splits the backward of {', '.join(odd)}, which the model would not; it runs as planned"
        )
    return planned
