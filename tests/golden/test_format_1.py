"""A checkpoint of the first release must load for ever, and the same state must still get the same id and bytes.

`format-1/` was written by `ckpt.Checkpointer("tests/golden/format-1").save(7, state())`.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch

import ckpt

GOLDEN = Path(__file__).parent / "format-1"
STATE_ID = "e0d1c36064ba5b5ed1156f644c8c1f62d45b95854ab2c4412625fe4e3c22aff0"


def state() -> dict[str, Any]:
    """Several dtypes, shapes, packed and not, tied tensors, values of many types."""

    def bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
        raw = (torch.arange(count) * 151 % 257 % 256).to(torch.uint8)
        return raw.view(dtype).reshape(shape)

    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.arange(p.numel()).reshape(p.shape) / 8)
    large = bits((130, 129), torch.float32)
    return {
        "model": model,
        "large": large,
        "tied": large,
        "bf16": bits((5, 3), torch.bfloat16),
        "fp8": bits((7,), torch.float8_e4m3fn),
        "flags": torch.tensor([True, False, True]),
        "count": torch.tensor(2**53 + 1),
        "none": torch.empty(0, 4),
        "a/b": {"..": bits((2,), torch.complex64), 3: bits((1,), torch.float64)},
        "values": {"step": 7, "lr": 0.1, "names": ["x", ("y", None)], "raw": b"\x00\xff", "big": 2**70, "on": True},
    }


def test_the_golden_checkpoint_loads_with_every_bit() -> None:
    wanted, found = state(), state()
    for entry in (found["large"], found["bf16"], found["fp8"], found["flags"], found["count"]):
        entry.view(torch.uint8 if entry.dim() else torch.int64).zero_()
    torch.nn.init.zeros_(found["model"].weight)
    found["values"] = dict.fromkeys(found["values"])
    with ckpt.Checkpointer(GOLDEN, read_only=True) as ck:
        restored = ck.load(found)
    assert restored is not None and (restored.step, restored.state_id) == (7, STATE_ID)
    assert found["values"] == wanted["values"]
    for name in ("large", "tied", "bf16", "fp8", "flags", "count", "none"):
        a, b = (s[name].reshape(-1).view(torch.uint8).numpy().tobytes() for s in (found, wanted))
        assert a == b, name
    assert found["model"].weight.detach().numpy().tobytes() == wanted["model"].weight.detach().numpy().tobytes()


def test_the_same_state_is_still_written_as_the_same_bytes(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as ck:
        assert ck.save(7, state()).state_id == STATE_ID
    (golden,), (now,) = (list(root.glob("attempts/*/*")) for root in (GOLDEN, tmp_path))
    assert _tree(golden) == _tree(now)


def _tree(attempt: Path) -> dict[str, str]:
    """SHA-256 of everything that the state alone determines."""
    files = [attempt / "manifest.json", *(f for f in (attempt / "state").rglob("*") if f.is_file())]
    return {str(f.relative_to(attempt)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
