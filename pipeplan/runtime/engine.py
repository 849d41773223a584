"""The engine: executes a plan's program on DeepSpeed's pipeline engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.runtime.utils import move_to_device
from deepspeed.utils import logger
from torch.autograd.graph import get_gradient_edge

from pipeplan.deepspeed_config import message_timeout_s
from pipeplan.deferral import WeightGradientStore, defer_weight_gradients
from pipeplan.errors import CheckpointError, LaunchError
from pipeplan.plan.layout import Placement
from pipeplan.plan.ops import Op, OpKind
from pipeplan.program import types as program_types
from pipeplan.program.trace import Trace
from pipeplan.program.types import Message, Payload, Program
from pipeplan.program.verify import VerifiedProgram
from pipeplan.runtime import boundary, schedule
from pipeplan.runtime.batch import BatchState, MicroBatches, Outgoing
from pipeplan.runtime.channels import Channels
from pipeplan.runtime.checkpoint.collective import has_latest, load_planned, save_planned
from pipeplan.runtime.deadlines import is_lost_connection
from pipeplan.runtime.forward_only import forward_program
from pipeplan.runtime.gradients import accumulated_gradient, global_gradient_norm, scale_gradients
from pipeplan.runtime.module import PlannedPipelineModule
from pipeplan.runtime.resizing import resize_together
from pipeplan.runtime.trace import BatchRecorder, gather_rank_traces
from pipeplan.runtime.weighting import micro_batch_weights


class PlannedPipelineEngine(PipelineEngine):
    """Runs a ``PlannedPipelineModule`` as its plan says; made by ``pipeplan.runtime.initialize``.

    The methods of DeepSpeed's pipeline engine work as documented there. Differences: micro-batches keep their
    number whatever the order (data, labels, dropout seeds, sums of losses), gradient norms are global, and boundaries
    between stages may be any pytree of tensors.
    """

    module: PlannedPipelineModule

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._is_constructed = False  # DeepSpeed's constructor asks for positions, not for stages
        super().__init__(*args, **kwargs)
        self._is_constructed = True
        self._rank_by_stage = self.module.rank_by_stage
        self._num_model_stages = len(self._rank_by_stage)
        replicas = [
            [self.grid.stage_to_global(rank, data=replica) for rank in range(self.num_stages)]
            for replica in range(self.grid.data_parallel_size)
        ]
        self._channels = Channels(
            self.stage_id,
            replicas,
            self.grid.data_parallel_id,
            torch.device(self.device),
            limit_s=message_timeout_s(self.config),
            is_dynamic=self.module.dynamic_shapes,
        )
        self._channels.deadlines.limit_collectives(
            [
                self.grid.get_pipe_parallel_group(),
                self.grid.get_model_parallel_group(),
                self.grid.get_data_parallel_group(),
                *(tied.group for tied in self.module.tied_weights),
            ]
        )
        self._weight_gradients = WeightGradientStore()
        self._whole_by_stage = {stage: self.module.whole_parameters(stage) for stage in self.module.stages}
        self.recorder = BatchRecorder(torch.device(self.device))
        self._evaluation_schedules: dict[int, schedule.PlannedSchedule] = {}  # keyed by number of micro-batches
        self._num_micro_batches_run = 0
        self._has_autocast = self.torch_autocast_enabled()
        self._at: object = None  # the instruction that runs
        self._program_by_count = {self.module.runnable.program.num_micro_batches: self.module.runnable.verified}
        self.set_program(self.module.runnable.verified)
        self._resize(self.micro_batches)
        if self.training_data:
            self._build_data_iter(self.training_data)

    # The program.

    def set_program(self, verified: VerifiedProgram) -> None:
        """Run the following batches with another program of the same placement; collective.

        A program for another number of micro-batches needs ``set_train_batch_size``, before or after.

        Raises:
            LaunchError: It places the stages elsewhere.
        """
        program = verified.program
        if program.rank_by_stage != self._rank_by_stage:
            raise LaunchError(
                f"the program places the stages on ranks {list(program.rank_by_stage)}, but the layers were built for "
                f"{list(self._rank_by_stage)}; a running engine can change the order only"
            )
        self._program = program
        self._program_by_count[program.num_micro_batches] = verified
        self._split_ops = {
            (step.op.stage, step.op.micro_batch)
            for step in program.instructions_by_rank[self.stage_id]
            if isinstance(step, program_types.Compute) and step.op.kind is OpKind.I
        }
        self._channels.prepare(program)
        self._schedule = self._schedule_of(program)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches a batch, as DeepSpeed does; collective.

        The plan's order is derived again for that number, verified, and said in the log.

        Raises:
            LaunchError: The plan's profile isn't known, or that many micro-batches don't fit.
        """
        super().set_train_batch_size(train_batch_size)
        self._resize(self.micro_batches)

    def _resize(self, num_micro_batches: int) -> None:
        """Run ``num_micro_batches`` a batch from now on, with the program that was given or derived for them."""
        if self._program.num_micro_batches == num_micro_batches:
            return
        if num_micro_batches not in self._program_by_count:
            self._program_by_count[num_micro_batches] = resize_together(self.module.runnable, num_micro_batches)
        self.set_program(self._program_by_count[num_micro_batches])

    def _train_schedule(self) -> schedule.PlannedSchedule:
        planned = self._program.num_micro_batches
        if self.micro_batches != planned:
            raise LaunchError(
                f"the engine runs {self.micro_batches} micro-batches a batch, but its program is for {planned}; call "
                f"set_train_batch_size for {planned}, or set_program with a program for {self.micro_batches}"
            )
        return self._schedule

    def _inference_schedule(self, micro_batches: int) -> schedule.PlannedSchedule:
        if micro_batches not in self._evaluation_schedules:
            self._evaluation_schedules[micro_batches] = self._schedule_of(forward_program(self._program, micro_batches))
        return self._evaluation_schedules[micro_batches]

    def _schedule_of(self, program: Program) -> schedule.PlannedSchedule:
        return schedule.PlannedSchedule(program.num_micro_batches, self.num_stages, self.stage_id, program)

    def _exec_schedule(self, pipe_schedule: schedule.PlannedSchedule) -> None:
        self._batch = BatchState()
        self._running = pipe_schedule.program
        num_uses = self.module.hosts_first_stage + self.module.hosts_last_stage
        self._data = MicroBatches(self._next_batch, num_uses)
        self._channels.start_batch()
        handlers: dict[type, Callable[..., None]] = {
            kind: MethodType(method, self) for kind, method in self._INSTRUCTION_MAP.items()
        }
        self._weights = self._weigh_micro_batches(pipe_schedule.micro_batches)
        mark = self.recorder.start_batch(pipe_schedule.program.instructions_by_rank[self.stage_id])
        for commands in pipe_schedule:
            for command in commands:
                self._at = command
                handlers[type(command)](**command.kwargs)
                mark()
        self._at = "the end of the batch"
        self._finish_batch(pipe_schedule.micro_batches)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Give up the batch's messages if it ends early, and name what ran when a collective lost another rank."""
        self._channels.check_usable()
        try:
            yield
        except RuntimeError as error:
            self._channels.abandon()
            if not is_lost_connection(error):
                raise
            raise LaunchError(
                f"rank {self.stage_id} was at {self._at!r} together with other ranks, of which one is gone or hangs; "
                f"its own error says why ({error})"
            ) from error
        except BaseException:
            self._channels.abandon()
            raise

    def _weigh_micro_batches(self, num_micro_batches: int) -> list[float]:
        """Return what each micro-batch's loss counts, 1 on average; only the rank of the loss needs it."""
        count_labels = self.module.count_labels
        if count_labels is None or not self.module.hosts_last_stage or not self._compute_loss:
            return [1.0] * num_micro_batches
        counts = [float(count_labels(labels)) for labels in self._data.labels(num_micro_batches)]
        group, num_replicas = self.grid.get_data_parallel_group(), self.grid.get_data_parallel_world_size()
        return micro_batch_weights(counts, group, num_replicas, torch.device(self.device))

    def _finish_batch(self, num_micro_batches: int) -> None:
        """Hand DeepSpeed the losses in micro-batch order."""
        self._channels.finish_batch()
        self.fwd_outputs = [self._batch.losses[micro_batch] for micro_batch in sorted(self._batch.losses)]
        if self._compute_loss and self.module.count_labels is not None:
            self.fwd_outputs = [weight * loss for weight, loss in zip(self._weights, self.fwd_outputs, strict=False)]
        if self.fwd_outputs:
            self.loss = self.fwd_outputs[-1]
            self.total_loss = sum(self.fwd_outputs[1:], self.fwd_outputs[0].clone())
        if self.eval_return_logits and self.module.hosts_last_stage:
            self.outputs = [self._batch.logits[micro_batch] for micro_batch in sorted(self._batch.logits)]
        if self._weight_gradients.pending_keys:
            raise LaunchError(f"weight gradients of {list(self._weight_gradients.pending_keys)} were never computed")
        if torch.is_grad_enabled():
            self._num_micro_batches_run += num_micro_batches

    # The measured trace.

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Train one batch, as DeepSpeed does, and mark its end for ``trace``."""
        with self._interruptible():
            loss = super().train_batch(*args, **kwargs)
        self.recorder.finish_batch()
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate any number of micro-batches, as DeepSpeed does, with a forward-only program of the same placement.

        Returns:
            The mean loss (``None`` off the loss's rank if ``bcast_loss`` is off); with ``return_logits`` also what the
            last stage returned for each micro-batch, in their order, on the rank that holds it and ``None`` elsewhere.
        """
        with self._interruptible():
            return super().eval_batch(
                data_iter,
                return_logits=return_logits,
                compute_loss=compute_loss,
                reduce_output=reduce_output if compute_loss else None,
                bcast_loss=bcast_loss,
                num_micro_batches=num_micro_batches,
            )

    def reset_activation_shape(self) -> None:
        """Let the following batches have boundaries of another shape; every rank calls it, as in DeepSpeed."""
        super().reset_activation_shape()
        self._channels.forget_shapes()

    def trace(self) -> Trace:
        """Return when every instruction of the last batch started and ended on every rank; collective.

        Each replica's ranks get the trace of their own pipeline. ``recorder.is_enabled = False`` stops recording.

        Raises:
            LaunchError: There was no batch, or it was interrupted.
        """
        global_ranks = [self.grid.stage_to_global(rank) for rank in range(self.num_stages)]
        ranks, error_ns = gather_rank_traces(
            self.recorder, global_ranks, self.grid.get_pipe_parallel_group(), torch.device(self.device)
        )
        plan = self.module.runnable.plan
        return Trace(
            model=plan.model,
            plan_digest=self._running.plan_digest,
            num_micro_batches=self._running.num_micro_batches,
            partition=plan.partition,
            placement=Placement(self._rank_by_stage),
            ranks=ranks,
            recomputed_stages=tuple(sorted(self.module.recomputed_stages)),
            clock_error_ns=error_ns,
        )

    # Ops.

    def _exec_compute(self, instruction: program_types.Compute) -> None:
        op = instruction.op
        if op.kind is OpKind.F:
            self._run_forward(op)
        elif op.kind is OpKind.W:
            with self._accumulate_gradients(), self.recorder.layers():
                self._weight_gradients.run((op.stage, op.micro_batch))
        else:
            self._run_backward(op)

    def _deferral(self, key: tuple[int, int]) -> AbstractContextManager[Any]:
        if key in self._split_ops and torch.is_grad_enabled():
            return defer_weight_gradients(self._weight_gradients, key, self._whole_by_stage[key[0]])
        return nullcontext()

    def _run_forward(self, op: Op) -> None:
        stage, micro_batch = key = (op.stage, op.micro_batch)
        is_last = stage == self._num_model_stages - 1
        inputs = self._load_inputs(micro_batch) if stage == 0 else self._batch.inputs.pop(key)
        autocast = autocast_if_enabled(self) if self._has_autocast else nullcontext()
        with self._deferral(key), autocast, self.recorder.layers():
            outputs = self.module.run_stage(stage, inputs, micro_batch, self._num_micro_batches_run)
            if is_last:
                self._keep_loss(key, outputs)
                return
        spec, tensors = boundary.split(outputs)
        is_first_of_stage = self._channels.record(stage, micro_batch, spec)
        if torch.is_grad_enabled():
            # Edges keep the graph, but not the outputs: those live until they are sent.
            self._batch.roots[key] = [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]
        if self._rank_by_stage[stage + 1] == self.stage_id:
            self._accept_inputs(stage + 1, micro_batch, tensors)
        else:
            self._batch.outgoing[key] = Outgoing(tensors, spec if is_first_of_stage else None)

    def _load_inputs(self, micro_batch: int) -> Any:
        inputs = move_to_device(self._data[micro_batch][0], self.device)
        return self._cast_inputs_half(inputs) if self.fp16_auto_cast() else inputs

    def _keep_loss(self, key: tuple[int, int], outputs: Any) -> None:
        micro_batch = key[1]
        if self.eval_return_logits:
            self._batch.logits[micro_batch] = outputs
        loss = outputs
        if self._compute_loss and self.module.loss_fn is not None:
            labels = move_to_device(self._data[micro_batch][1], self.device)
            loss = self.module.loss_fn(outputs, labels)
        if torch.is_tensor(loss):
            self._batch.losses[micro_batch] = loss.detach().float()  # so that sums are not rounded to bf16
            if loss.requires_grad:
                self._batch.roots[key] = [get_gradient_edge(loss)]
                self._batch.output_gradients[key] = [self._loss_gradient(loss, self._weights[micro_batch])]

    def _loss_gradient(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """Return what the loss's backward starts from: the share of the batch, and the loss scale of fp16."""
        share = torch.full_like(loss, weight / self._running.num_micro_batches, requires_grad=False)
        loss_scaler = getattr(self.optimizer, "loss_scaler", None)
        if loss_scaler is not None:
            share = share * loss_scaler.loss_scale
        return share

    def _accept_inputs(self, stage: int, micro_batch: int, tensors: Any) -> None:
        """Make what arrived for a forward the leaves of its graph."""
        spec = self._channels.spec(stage - 1, micro_batch)
        leaves = boundary.detach_inputs(spec, tensors)
        self._batch.inputs[stage, micro_batch] = spec.join(leaves)
        if torch.is_grad_enabled():
            self._batch.input_leaves[stage, micro_batch] = [leaf for leaf in leaves if leaf.requires_grad]

    def _run_backward(self, op: Op) -> None:
        stage, micro_batch = key = (op.stage, op.micro_batch)
        roots = self._batch.roots.pop(key, [])
        gradients = self._batch.output_gradients.pop(key, [])
        pairs = [(root, gradient) for root, gradient in zip(roots, gradients, strict=True) if gradient is not None]
        if pairs:
            with self._deferral(key), self._accumulate_gradients(), self.recorder.layers():
                torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        else:
            self.recorder.no_layers()
        if stage == 0:
            return
        leaves = self._batch.input_leaves.pop(key)
        if self._rank_by_stage[stage - 1] == self.stage_id:
            self._batch.output_gradients[stage - 1, micro_batch] = [leaf.grad for leaf in leaves]
        else:
            self._batch.outgoing_gradients[key] = [
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves
            ]

    @contextmanager
    def _accumulate_gradients(self) -> Iterator[None]:
        """Let DeepSpeed's optimizer collect the gradients of one backward."""
        self._running_engine_backward = True
        try:
            if self.using_bf16_optimizer:
                self.optimizer.clear_lp_grads()
                yield
                self.optimizer.update_hp_grads(clear_lp_grads=False)
            else:
                yield
        finally:
            self._running_engine_backward = False

    # Messages.

    def _exec_send(self, instruction: program_types.Send) -> None:
        message = instruction.message
        key = (message.source_stage, message.micro_batch)
        if message.payload is Payload.ACTIVATION:
            outgoing = self._batch.outgoing.pop(key)
            self._channels.send(message, outgoing.tensors, outgoing.header)
        else:
            self._channels.send(message, self._batch.outgoing_gradients.pop(key))

    def _exec_receive(self, instruction: program_types.Receive) -> None:
        self._channels.post_receive(instruction.message)

    def _exec_wait_receive(self, instruction: program_types.WaitReceive) -> None:
        message: Message = instruction.message
        tensors = self._channels.wait_receive(message)
        if message.payload is Payload.ACTIVATION:
            self._accept_inputs(message.target_stage, message.micro_batch, tensors)
        else:
            self._batch.output_gradients[message.target_stage, message.micro_batch] = tensors

    def _exec_wait_send(self, instruction: program_types.WaitSend) -> None:
        self._channels.wait_send(instruction.message)

    # The end of a batch.

    def _exec_tied(self, instruction: program_types.ReduceTied) -> None:
        placeholder = getattr(self.module, "placeholder", None)
        if placeholder is not None:
            with self._accumulate_gradients():
                (placeholder.sum() * 0.0).backward()
        for tied in self.module.tied_weights:
            tied.sum_gradients(
                partial(accumulated_gradient, optimizer=self.optimizer, is_bf16=self.using_bf16_optimizer)
            )

    def _exec_replicas(self, instruction: program_types.ReduceReplicas) -> None:
        # ZeRO-1 moves the gradients into its partitions here; without it a lone replica has nothing to average.
        if self.is_data_parallel or (self.zero_optimization() and not self.using_bf16_optimizer):
            self._exec_reduce_grads()

    def _exec_step(self, instruction: program_types.OptimizerStep) -> None:
        self._exec_optimizer_step()

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm over all ranks; called by DeepSpeed for fp32 without ZeRO."""
        parameters = list(self.module.parameters())
        norm = global_gradient_norm(parameters, self.grid.get_model_parallel_group(), torch.device(self.device))
        scale_gradients(parameters, norm, self.gradient_clipping())
        self._global_grad_norm = norm

    # Checkpoints.

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint that loads under any plan and in one process; collective.

        It is complete or not there. DeepSpeed's own engine reads its weights; see ``pipeplan.runtime.checkpoint``.

        Raises:
            CheckpointError: It can't be written; raised on every rank.
        """
        save_planned(
            self,
            Path(save_dir),
            tag,
            client_state or {},
            is_latest=save_latest,
            leaves_out_frozen=exclude_frozen_parameters,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of any plan, number of ranks and replicas, or of one process; collective.

        Returns:
            The checkpoint's folder and the script's own state; ``(None, None)`` if no tag is given and there is no
            file ``latest``.

        Raises:
            CheckpointError: It doesn't fit this model or optimizer, or is damaged; raised on every rank.
        """
        if custom_load_fn is not None:
            raise CheckpointError("custom_load_fn is not supported under a plan; load the weights before initialize()")
        if tag is None and not has_latest(Path(load_dir)):
            logger.warning(f"{load_dir} holds no file 'latest'; no checkpoint is loaded")
            return None, None
        return load_planned(
            self,
            Path(load_dir),
            tag,
            is_strict=load_module_strict,
            loads_optimizer=load_optimizer_states,
            loads_scheduler=load_lr_scheduler_states,
            loads_weights_only=load_module_only,
        )

    # DeepSpeed asks these about the rank.

    def is_first_stage(self) -> bool:
        """Whether this rank reads the inputs."""
        return self.module.hosts_first_stage if self._is_constructed else super().is_first_stage()

    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.module.hosts_last_stage if self._is_constructed else super().is_last_stage()

    def _loss_stage_global_rank(self) -> int:
        return self.grid.stage_to_global(self._rank_by_stage[-1])

    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., None]]] = {
        schedule.Compute: _exec_compute,
        schedule.Send: _exec_send,
        schedule.Receive: _exec_receive,
        schedule.WaitReceive: _exec_wait_receive,
        schedule.WaitSend: _exec_wait_send,
        schedule.ReduceTied: _exec_tied,
        schedule.ReduceReplicas: _exec_replicas,
        schedule.OptimizerStep: _exec_step,
    }
