"""The records of an attempt as bytes: they come back, and whatever was changed in them is refused."""

import copy
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from ckpt.errors import CkptError
from ckpt.fingerprint import Digest
from ckpt.geometry import Catalogue
from ckpt.state.values import encode
from ckpt.store.commit import assemble
from ckpt.store.records import Intent, Manifest, Receipt
from tests.store.attempts import ALIASES, RUN, SPECS, URL, VALUES, make_attempt, other
from tests.support.raw import canonical

INTENT, RECEIPTS = make_attempt()


MANIFEST = assemble(INTENT, RECEIPTS, RUN, URL).manifest


@pytest.mark.parametrize("record", [INTENT, *RECEIPTS, MANIFEST], ids=lambda r: type(r).__name__)
def test_records_come_back_from_their_bytes(record: Any) -> None:
    data = record.document()
    assert canonical(json.loads(data)) == data
    again = type(record).parse(data, URL)
    assert again == record
    assert again.document() == data


def forgeries(document: Any) -> Iterator[tuple[str, Any]]:
    """Copies of a JSON document with one thing changed: each leaf replaced, each entry dropped, one added."""
    for path in paths(document):
        here = at(document, path)
        where = "/".join(map(str, path))
        for value in replacements(here):
            yield f"{where} = {value!r}", with_change(document, path, value)
        if path:
            copied = copy.deepcopy(document)
            del at(copied, path[:-1])[path[-1]]
            yield f"{where} dropped", copied
        if isinstance(here, dict):
            yield f"{where} gains a field", with_change(document, path, {**here, "more": 1})
        if isinstance(here, list) and here:
            yield f"{where} repeats", with_change(document, path, [*here, here[-1]])
            if len(here) > 1 and here[0] != here[-1]:
                yield f"{where} turned around", with_change(document, path, here[::-1])


def replacements(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value, int(value)]
    if isinstance(value, int):
        return [value + 1, value - 1, value * 2 + 1, 0.5, str(value), None, True]
    if isinstance(value, str):
        flipped = value[:-1] + ("0" if value[-1:] != "0" else "1")
        return [flipped, value + "0", "", None, 7, [value], {}]
    return [None, [], {}, 7, "text"]


def paths(document: Any, start: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield start
    entries = document.items() if isinstance(document, dict) else enumerate(document) if _is_list(document) else ()
    for key, value in entries:
        yield from paths(value, (*start, key))


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def with_change(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copied = copy.deepcopy(document)
    at(copied, path[:-1])[path[-1]] = value
    return copied


def accepted(record: Any, use: Callable[[Any], object]) -> list[str]:
    """The forgeries of a record that pass for one; every other must be refused by an error of ours."""
    data = record.document()
    found = []
    for what, forged in forgeries(json.loads(data)):
        if canonical(forged) != data:
            try:
                again = type(record).parse(canonical(forged), URL)
                assert again.document() == canonical(forged) and again != record, what
                use(again)
                found.append(what)
            except CkptError:
                continue
    return found


def test_a_manifest_with_any_field_changed_is_refused() -> None:
    """By itself, but for how a tensor was cut into objects: other cuts would do, and the commit pins the one."""
    free = re.compile(r"arrays/\d/cell/\d = |tensors/\d/stack = ")
    found = accepted(MANIFEST, lambda _: None)
    assert [what for what in found if not free.match(what)] == []
    assert len(found) < 20


def test_an_intent_with_any_field_changed_leads_to_no_commit() -> None:
    assert accepted(INTENT, lambda forged: assemble(forged, RECEIPTS, RUN, URL)) == []


def test_a_receipt_with_any_field_changed_leads_to_no_commit() -> None:
    """But for what is its rank's word alone: its own plain values, the order of its objects, whether it holds what
    another holds as well, or a part of nothing."""
    free = re.compile(r"per_rank|objects turned around|held/empty|held/[^ ]* (dropped|= \[\])$")
    found = accepted(RECEIPTS[1], lambda forged: assemble(INTENT, [RECEIPTS[0], forged], RUN, URL))
    assert [what for what in found if not free.match(what)] == []
    assert "held/big dropped" not in found  # nobody else holds that


@pytest.mark.parametrize("kind", [Intent, Receipt, Manifest])
@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b'{"format":1}', b'"text"', b"\x00", b"{" * 100_000])
def test_documents_that_are_no_records_are_refused(kind: Any, data: bytes) -> None:
    with pytest.raises(CkptError, match=URL):
        kind.parse(data, URL)


def test_another_format_version_asks_for_another_ckpt() -> None:
    for record in (INTENT, RECEIPTS[0], MANIFEST):
        forged = canonical({**json.loads(record.document()), "format": 2})
        with pytest.raises(CkptError, match=r"format version 2.*use a newer ckpt"):
            type(record).parse(forged, URL)


def test_a_manifest_whose_state_was_changed_with_its_state_id_still_contradicts_the_commit() -> None:
    """The state id covers names, dtypes, shapes, fingerprints and values: each change gives another id."""
    ids = {MANIFEST.state_id}
    digests: Mapping[str, Digest] = dict(
        zip((t.name for t in MANIFEST.catalogue.tensors), MANIFEST.digests, strict=True)
    )
    first = SPECS[0]
    for specs in (
        (dataclasses.replace(first, name="another"), *SPECS[1:]),
        (dataclasses.replace(first, dtype="int32"), *SPECS[1:]),
        (dataclasses.replace(first, shape=(*first.shape, 1)), *SPECS[1:]),
        SPECS[1:],
    ):
        own = {s.name: digests.get(s.name, digests[first.name]) for s in specs}
        aliases = {n: k for n, k in ALIASES.items() if k in own}
        ids.add(Manifest.of(Catalogue.of(specs), own, aliases, VALUES).state_id)
    for name in digests:
        ids.add(Manifest.of(MANIFEST.catalogue, {**digests, name: other(digests[name])}, ALIASES, VALUES).state_id)
    for values in ({}, {**VALUES, "step": encode(8, "")}, {**VALUES, "step": encode(7.0, "")}):
        ids.add(Manifest.of(MANIFEST.catalogue, digests, ALIASES, values).state_id)
    ids.add(Manifest.of(MANIFEST.catalogue, digests, {}, VALUES).state_id)
    ids.add(Manifest.of(MANIFEST.catalogue, digests, {"tied": "deep"}, VALUES).state_id)
    assert len(ids) == 1 + 4 + len(digests) + 3 + 2
