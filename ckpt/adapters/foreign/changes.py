"""A state at rest seen through a choice of tensors, new names, or a cast; and a record of what that changes."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ckpt.engine.stream import Content, Source
from ckpt.errors import CkptError, Unsupported
from ckpt.geometry import Box, TensorSpec
from ckpt.state.dtypes import STORED, bits, torch_dtype
from ckpt.state.names import join, split
from ckpt.state.values import Json

_NO_CAST = ("float4_e2m1fn_x2",)  # two numbers in a byte


@dataclass(frozen=True)
class Changes:
    """What is asked for. select: patterns of names as the shell has them, of which one must fit; none: everything.
    rename: regular expressions and what they become, one after the other. dtype: of all floating-point tensors."""

    select: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and (self.dtype not in STORED or not torch_dtype(self.dtype).is_floating_point):
            raise CkptError(f"{self.dtype}: not a floating-point dtype that ckpt carries")
        if self.dtype in _NO_CAST:
            raise Unsupported(f"{self.dtype}: torch does not cast to it")
        for pattern, new in self.rename:
            try:
                re.sub(pattern, new, "")
                re.compile(pattern)
            except (re.error, IndexError) as error:
                raise CkptError(
                    f"{pattern!r} and {new!r}: not a regular expression and what it becomes: {error}"
                ) from None

    def name(self, name: str) -> str | None:
        """The new name; None where the entry is not selected."""
        if self.select and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.select):
            return None
        for pattern, new in self.rename:
            name = re.sub(pattern, new, name)
        try:
            if name and join(split(name)) == name:
                return name
        except ValueError:
            pass
        raise CkptError(f"{name!r} is no name that an entry can have; choose another --rename")


class Changed:
    """`source` with changes. `map` says what each changed entry was and is."""

    def __init__(self, source: Source, changes: Changes) -> None:
        """Raises CkptError where two entries would get one name, or nothing is selected."""
        self.url = source.url
        self._source, self._changes = source, changes
        old = source.content
        specs = {t.name: t for t in old.tensors}
        owners = {name: name for name in specs} | dict(old.aliases)
        names = _renamed({name: name for name in owners}, changes)  # old names by the new ones
        self._old = {
            new: specs[owners[name]] for new, name in names.items()
        }  # the smallest of tied names has the tensor
        first: dict[str, str] = {}
        aliases = {}
        for new in sorted(names):
            kept = first.setdefault(self._old[new].name, new)
            if kept != new:
                aliases[new] = kept
        self._new = {new: self._cast(replace(self._old[new], name=new)) for new in first.values()}
        self._names = names
        values = _renamed(old.values, changes)
        ranks = tuple(_renamed(r, changes) for r in old.ranks)
        for named in (values, *ranks):
            if named.keys() & names.keys():
                raise CkptError(f"two entries would be called {min(named.keys() & names.keys())}")
        if not names and not values and not any(ranks):
            raise CkptError(f"{source.url}: nothing there fits {', '.join(changes.select)}")
        self.content = Content(
            tuple(sorted(self._new.values())),
            aliases,
            values,
            ranks,
            old.left_out,
            f"{old.identity} {changes}",
            old.step,
        )

    @property
    def map(self) -> Json:
        """Of each entry that is not as it was: name and dtype, and new name and dtype, for tensors; name and new name,
        for values; and the names of what is gone."""
        old = self._source.content
        cast = {new: self._cast(spec).dtype for new, spec in self._old.items()}
        values = {name: self._changes.name(name) for named in (old.values, *old.ranks) for name in named}
        gone = ({t.name for t in old.tensors} | old.aliases.keys()) - set(self._names.values())
        return {
            "changed": sorted(
                [name, self._old[new].dtype, new, cast[new]]
                for new, name in self._names.items()
                if (name, self._old[new].dtype) != (new, cast[new])
            ),
            "values": sorted([name, new] for name, new in values.items() if new not in (None, name)),
            "left_out": sorted(gone | {name for name, new in values.items() if new is None}),
        }

    def _cast(self, spec: TensorSpec) -> TensorSpec:
        dtype = self._changes.dtype
        if dtype in (None, spec.dtype) or not torch_dtype(spec.dtype).is_floating_point:
            return spec
        if spec.dtype in _NO_CAST:
            raise Unsupported(f"{spec.name}: torch does not cast {spec.dtype}; leave it out with --select")
        return replace(spec, dtype=dtype, itemsize=STORED[dtype].itemsize)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `ckpt.engine.stream.Source`; a cast rounds to nearest, ties to even."""
        old, new = self._old[name], self._new[name]
        found = self._source.read(old.name, box)
        if old.dtype == new.dtype:
            return found
        return bits(rounded(found.view(torch_dtype(old.dtype)), torch_dtype(new.dtype)))


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A cast that rounds once, to nearest, ties to even; every NaN becomes one and the same, since those that torch
    makes depend on the length of its vectors.

    torch goes from float64 to narrow types by way of float32 and rounds twice; here that step rounds to odd, which the
    second cannot tell from the number itself (Boldo and Melquiond, Emulation of FMA and correctly rounded sums: proved
    algorithms using rounding to odd, 2008).
    """
    if tensor.dtype.itemsize == 1:
        tensor = tensor.to(torch.float32)
    odd = _rounded_to_odd(tensor) if tensor.dtype == torch.float64 and dtype.itemsize < 4 else tensor
    nan = bits(torch.tensor(float("nan"), dtype=dtype))
    return torch.where(tensor.isnan(), nan, bits(odd.to(dtype))).view(dtype)


def _rounded_to_odd(tensor: torch.Tensor) -> torch.Tensor:
    single = tensor.to(torch.float32)
    back = single.to(torch.float64)
    inexact = back != tensor
    too_far = inexact & (back.abs() > tensor.abs())
    return ((single.view(torch.int32) - too_far.int()) | inexact.int()).view(torch.float32)


def _renamed(values: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        new = changes.name(name)
        if new is not None:
            if new in found:
                raise CkptError(f"two entries would be called {new}; choose another --rename")
            found[new] = value
    return found
