"""Writes memory_block.csv files of a small made-up training program, of any length, with known contents.

The program has the shape of Megatron's: build layers, make the gradient buffer, copy weights for the optimizer, then
iterations of a 1F1B schedule and an optimizer step that keeps its states from the first time on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

NEVER = 2**63 - 1
HEADER = (
    "start_time_stamp,end_time_stamp,device_addr,stream_id,pool_type,size,actual_used_memory,actual_peak_memory,"
    "file_name,line_num,type,producer_task,task_name,node_name,graph_name,user_tasks,last_user_task,python_stack,"
    "is_persistent,is_small,\n"
)
CORE = "/site/megatron/core"


def frames(*calls: tuple[str, int, str]) -> str:
    """A python_stack, outermost call first."""
    return "".join(f"File:{file};Line:{line};Function:{function}|" for file, line, function in calls)


MAIN = (("/job/pretrain_gpt.py", 300, "<module>"), ("/site/megatron/training/training.py", 500, "pretrain"))
SCHEDULE = (*MAIN, ("/site/megatron/training/training.py", 900, "train_step"))
MODEL = (
    (f"{CORE}/pipeline_parallel/schedules.py", 277, "forward_step"),
    ("/job/pretrain_gpt.py", 95, "forward_step"),
    ("/site/msadapter/nn/modules/module.py", 688, "_wrapped_call_impl"),
    ("/site/msadapter/nn/modules/module.py", 748, "_call_impl"),
    (f"{CORE}/distributed/data_parallel_base.py", 22, "forward"),
    ("/site/msadapter/nn/modules/module.py", 688, "_wrapped_call_impl"),
    ("/site/msadapter/nn/modules/module.py", 748, "_call_impl"),
)
CALL = (
    ("/site/msadapter/nn/modules/module.py", 688, "_wrapped_call_impl"),
    ("/site/msadapter/nn/modules/module.py", 748, "_call_impl"),
)
LINEAR = (
    *CALL,
    (f"{CORE}/tensor_parallel/layers.py", 943, "forward"),
    (f"{CORE}/tensor_parallel/layers.py", 668, "linear_with_grad_accumulation_and_async_allreduce"),
    ("/site/msadapter/autograd/function.py", 120, "apply"),
    (f"{CORE}/tensor_parallel/layers.py", 439, "forward"),
)
LIBRARY = (
    ("/site/msadapter/ops/blas.py", 89, "matmul"),
    ("/site/mindspore/ops/auto_generate/gen_ops_prim.py", 3374, "__call__"),
)


@dataclass
class Tensor:
    start: int
    size: int
    node: str
    stack: str
    category: str  # what the program means by it: the expected answer
    kind: str = "PyNativeOutput"
    end: int = NEVER


@dataclass
class Program:
    """Sizes are bytes. `tensors` are in the order of allocation."""

    layers: int = 3
    microbatches: int = 4
    in_flight: int = 2
    weight: int = 4 << 20
    activation: int = 8 << 20
    recompute: bool = False
    distributed_optimizer: bool = False
    tensors: list[Tensor] = field(default_factory=list)
    now: int = 0
    iteration_starts: list[int] = field(default_factory=list)  # index of the first tensor of each iteration

    def new(self, size: int, node: str, calls: tuple[tuple[str, int, str], ...], category: str, **more: str) -> Tensor:
        self.now += 2
        tensor = Tensor(self.now, size, node, frames(*calls, *LIBRARY), category, **more)
        self.tensors.append(tensor)
        return tensor

    def free(self, tensor: Tensor) -> None:
        self.now += 1
        tensor.end = self.now

    def build(self) -> None:
        init = (*MAIN, (f"{CORE}/models/gpt/gpt_model.py", 132, "__init__"))
        self.new(2 * self.weight, "Empty", (*init, (f"{CORE}/tensor_parallel/layers.py", 231, "__init__")), "weights")
        for _ in range(self.layers):
            for line in (210, 240):
                at = (
                    (f"{CORE}/transformer/transformer_block.py", 294, "build_layer"),
                    (f"{CORE}/transformer/transformer_layer.py", line, "__init__"),
                )
                self.new(self.weight, "Empty", (*init, *at), "weights")
        total = (2 + 2 * self.layers) * self.weight
        buffer = f"{CORE}/distributed/param_and_grad_buffer.py"
        ddp = (*MAIN, (f"{CORE}/distributed/distributed_data_parallel.py", 182, "_allocate_buffers_for_parameters"))
        if self.distributed_optimizer:
            for tensor in self.tensors:  # the parameters move into their buffer
                self.free(tensor)
            self.new(total, "Zeros", (*ddp, (buffer, 622, "__init__")), "weights")
        self.new(2 * total, "Zeros", (*ddp, (buffer, 628, "__init__")), "gradients")
        optimizer = (*MAIN, (f"{CORE}/optimizer/optimizer.py", 551, "__init__"))
        for _ in range(self.layers):
            self.new(2 * total // self.layers, "ToDtype", optimizer, "optimizer")

    def layer(self, schedule: tuple[tuple[str, int, str], ...], kept: str) -> list[Tensor]:
        block = (f"{CORE}/transformer/transformer_block.py", 529, "forward")
        forward = f"{CORE}/transformer/transformer_layer.py"
        held = []
        for line, nodes in ((389, ("RmsNorm", "FlashAttentionScore")), (390, ("MatMulExt", "Swiglu"))):
            for node in nodes:
                at = (*schedule, block, (forward, 786, "__call__"), *CALL, (forward, line, "forward"), *LINEAR)
                held.append(self.new(self.activation, node, at, kept))
                scratch = self.new(512, "Cast", at, "temporary")
                self.free(scratch)
        return held

    def forward(self, line: int) -> list[list[Tensor]]:
        schedule = (*SCHEDULE, (f"{CORE}/pipeline_parallel/schedules.py", line, "forward_backward"), *MODEL)
        model = f"{CORE}/models/gpt/gpt_model.py"
        held = [[self.new(self.activation // 8, "Embedding", (*schedule, (model, 269, "forward")), "activations")]]
        schedule = (*schedule, (model, 334, "forward"))
        for _ in range(self.layers):
            if self.recompute:
                at = (*schedule, (f"{CORE}/transformer/transformer_block.py", 500, "_checkpointed_forward"))
                tensors = self.layer((*at, (f"{CORE}/tensor_parallel/random.py", 400, "forward")), "temporary")
                for tensor in tensors[:-1]:
                    self.free(tensor)
                tensors[-1].category = "activations"
                held.append(tensors[-1:])
            else:
                held.append(self.layer(schedule, "activations"))
        return held

    def backward(self, held: list[list[Tensor]], line: int) -> None:
        at = (
            *SCHEDULE,
            (f"{CORE}/pipeline_parallel/schedules.py", line, "forward_backward"),
            (f"{CORE}/pipeline_parallel/schedules.py", 395, "backward_step"),
            ("/site/msadapter/autograd/graph.py", 216, "_engine_run_backward"),
        )
        for layer in reversed(held):
            again: list[Tensor] = []
            if self.recompute:
                again = self.layer((*at, (f"{CORE}/tensor_parallel/random.py", 450, "backward")), "activations")
            grad = self.new(self.activation, "SwigluGrad", at, "temporary")
            for tensor in (*again, *layer):
                self.free(tensor)
            self.free(grad)

    def iteration(self) -> None:
        self.iteration_starts.append(len(self.tensors))
        p2p = (*SCHEDULE, (f"{CORE}/pipeline_parallel/p2p_communication.py", 299, "create_tensor_recv_next"))
        waiting: list[list[list[Tensor]]] = []
        for number in range(self.microbatches):
            waiting.append(self.forward(1847 if number < self.in_flight - 1 else 1887))
            if len(waiting) == self.in_flight:
                received = self.new(self.activation // 8, "Empty", p2p, "communication")
                self.backward(waiting.pop(0), 1932)
                self.free(received)
        for held in waiting:
            self.backward(held, 1960)
        step = (*SCHEDULE, (f"{CORE}/optimizer/adamw.py", 139, "step"))
        if len(self.iteration_starts) == 1:
            for _ in range(2):
                self.new(2 * (2 + 2 * self.layers) * self.weight, "ZerosLikeExt", step, "optimizer")
        self.free(self.new(self.activation, "Contiguous", step, "temporary"))

    def run(self, iterations: int = 2) -> Program:
        self.build()
        for _ in range(iterations):
            self.iteration()
        return self

    def peak(self) -> tuple[int, int, Counter[str]]:
        """The straightforward way: all events sorted. Peak, its time, bytes by category."""
        events = [(tensor.start, 1, tensor) for tensor in self.tensors]
        events += [(tensor.end, 0, tensor) for tensor in self.tensors if tensor.end < NEVER]
        used = peak = at = 0
        for time, starts, tensor in sorted(events, key=lambda event: event[:2]):
            used += tensor.size if starts else -tensor.size
            if used > peak:
                peak, at = used, time
        alive = [tensor for tensor in self.tensors if tensor.start <= at < tensor.end]
        sizes: Counter[str] = Counter()
        for tensor in alive:
            sizes[tensor.category] += tensor.size
        return peak, at, sizes

    def lines(self, repeat_last: int = 0) -> Iterator[str]:
        """Rows of the file; the last iteration is written `repeat_last` times more, later each time."""
        rows = list(self._rows())
        yield from (row(0) for row in rows)
        first = self.iteration_starts[-1]
        length = self.now - self.tensors[first].start + 4
        for again in range(1, repeat_last + 1):
            for row in rows[first:]:
                yield row(again * length)

    def _rows(self):  # type: ignore[no-untyped-def]
        used_at = self._used()
        for index, tensor in enumerate(self.tensors):
            used, top = used_at[index]

            def row(shift: int, tensor: Tensor = tensor, used: int = used, top: int = top) -> str:
                end = tensor.end if tensor.end == NEVER else tensor.end + shift
                return (
                    f"{tensor.start + shift},{end},0x800ea8afebb7,0,DefaultEnhancedAscendMemoryPool,{tensor.size},{used},{top},"
                    f"mindspore/ccsrc/backend/common/device_address_utils.cc,1213,{tensor.kind},"
                    f"{tensor.start + shift - 2},PyNative,"
                    f"{tensor.node},,{{{tensor.start + shift}}},{tensor.start + shift},{tensor.stack},0,0,\n"
                )

            yield row

    def _used(self) -> list[tuple[int, int]]:
        import heapq

        result, ends, used, top = [], [], 0, 0  # type: ignore[var-annotated]
        for tensor in self.tensors:
            while ends and ends[0][0] <= tensor.start:
                used -= heapq.heappop(ends)[1]
            used += tensor.size
            heapq.heappush(ends, (tensor.end, tensor.size))
            top = max(top, used + (used >> 5))  # as if a thirty-second part were fragments
            result.append((used, top))
        return result

    def write(self, path: Path, repeat_last: int = 0) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.write(HEADER)
            file.writelines(self.lines(repeat_last))
        return path
