"""Real Megatron Core on CPU with gloo: `with megatron_on_cpu(): ...` around building and training a model.

For tests and demos only. It patches torch and Megatron while the context is open and puts everything back
after, so it never belongs in the package: `ckpt` must work outside it. Written against megatron-core 0.16.1;
names that a version lacks are skipped or supplied, so newer ones should need little.

What is patched, and why:

- `device="cuda"`, as a keyword or in `Tensor.to("cuda")` and `Tensor.cuda()`, means the CPU. Schedules,
  optimizers and the router have it as a literal.
- `Tensor.type()` answers `torch.cuda.FloatTensor` for a CPU tensor, because the gradient clip and the
  DistributedOptimizer compare that string.
- `torch.cuda.current_device()` is the CPU device: buffers are allocated on it.
- `torch.cuda.Stream`, `Event`, `current_stream` and the like do nothing: CPU work is in order already.
- The CUDA generator is the CPU's default generator, so that Megatron's RNG tracker forks and restores that.
- `all_to_all_single` gets its split sizes as ints; gloo refuses the 0-dim tensors of the MoE dispatcher.
- `moe_utils.te_general_gemm` exists; 0.16.1 leaves the name undefined where Transformer Engine is missing.

What still cannot run: sequence parallelism with torch norms (Megatron refuses it), Transformer Engine and
fused kernels.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_MISSING = object()

PLAIN: dict[str, Any] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
"""Fields of a TransformerConfig without fused kernels, which the CPU has none of."""


def _names_cuda(value: object) -> bool:
    if isinstance(value, str):
        return value == "cuda" or value.startswith("cuda:")
    return isinstance(value, torch.device) and value.type == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Sends every request for a CUDA tensor to the CPU. Holds for the thread that enters it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = tuple("cpu" if _names_cuda(arg) else arg for arg in args)
        elif func is torch.Tensor.cuda:
            return args[0]
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class _InOrder:
    """Stands for a stream or an event where all work is done in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, *_: Any) -> "_InOrder":
        return _InOrder()


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _with_int_splits(all_to_all: Callable[..., Any]) -> Callable[..., Any]:
    def ints(sizes: Sequence[Any] | None) -> list[int] | None:
        return None if sizes is None else [int(size) for size in sizes]

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[Any] | None = None,
        input_split_sizes: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        return all_to_all(output, input, ints(output_split_sizes), ints(input_split_sizes), **kwargs)

    return all_to_all_single


def _patches() -> list[tuple[Any, str, Any]]:
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.moe_utils as moe_utils

    cuda = torch.cuda
    return [
        (cuda, "current_device", lambda: torch.device("cpu")),
        (cuda, "synchronize", lambda *_: None),
        (cuda, "get_rng_state", _get_rng_state),
        (cuda, "set_rng_state", _set_rng_state),
        (cuda, "manual_seed", lambda seed: torch.manual_seed(seed)),
        (cuda, "Event", _InOrder),
        (cuda, "Stream", _InOrder),
        (cuda, "current_stream", _InOrder),
        (cuda, "default_stream", _InOrder),
        (cuda, "stream", lambda *_: contextlib.nullcontext()),
        (torch.Tensor, "record_stream", lambda *_: None),
        (megatron_random, "_get_cuda_rng_state", _get_rng_state),
        (megatron_random, "_set_cuda_rng_state", _set_rng_state),
        (moe_utils, "te_general_gemm", getattr(moe_utils, "te_general_gemm", None)),
        (dist, "all_to_all_single", _with_int_splits(dist.all_to_all_single)),
    ]


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Within it, Megatron Core builds and trains on the CPU. May be entered again and again, and nested."""
    patches = _patches()
    saved = [(owner, name, getattr(owner, name, _MISSING)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        with _CudaMeansCpu():
            yield
    finally:
        for owner, name, value in saved:
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
