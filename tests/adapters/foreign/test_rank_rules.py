"""What the rules say that a rank holds, against what real Megatron models held, and against tables made by hand."""

from pathlib import Path

import numpy as np
import pytest

from ckpt import Layout
from ckpt.adapters.foreign.into import open_session
from ckpt.adapters.foreign.rank_files import plan_files
from ckpt.adapters.foreign.rank_rules import NO_RULE, Given, Placer
from ckpt.engine.rest import CommittedState
from ckpt.engine.stream import Content
from ckpt.errors import CkptError, Unsupported
from ckpt.geometry import Box, TensorSpec
from ckpt.store.records import Receipt
from tests.support.layouts import FAMILIES, Stop, faults, tour
from tests.support.roots import Root

SAVED = [
    ("dense", Layout(tp=2, pp=2)),
    ("tied", Layout(tp=2, pp=2)),
    ("grouped", Layout(tp=4)),
    ("experts", Layout(tp=2, dp=2, ep=2)),
    ("experts", Layout(tp=2, dp=2, ep=2, etp=1)),
]


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_ranks_hold_what_megatron_gave_them(tmp_path: Path) -> None:
    """Each rank's receipt, in elements of every tensor of model and optimizer."""
    stops = [
        Stop(layout, FAMILIES[family].size, Root(str(tmp_path / f"{n}")), save=True)
        for n, (family, layout) in enumerate(SAVED)
    ]
    assert faults(stops, tour(stops)) == []
    for stop in stops:
        session = open_session(stop.root.url)
        record = session.log.read().newest()
        assert record is not None
        state = CommittedState(session, record)
        placer = Placer(state.content, stop.layout)
        assert NO_RULE not in {rule.what for rule in placer.rules.values()}
        for rank in range(stop.layout.world):
            key = f"{state.opened.prefix}receipts/{rank:06d}.json"
            held = Receipt.parse(session.store.get(key), key).held
            for name in placer.specs:
                part = placer.part(name, rank)
                ours = [] if part is None else [box for box, _ in part.boxes]
                theirs = [box for box, _ in held.get(name, [])]
                shape = placer.specs[name].shape
                assert _elements(ours, shape) == _elements(theirs, shape), f"{stop.layout} rank {rank}: {name}"


def _elements(boxes: list[Box], shape: tuple[int, ...]) -> bytes:
    """Which elements of a tensor are in some box."""
    mask = np.zeros(shape, dtype=bool)
    for box in boxes:
        mask[box.slices] = True
    return mask.tobytes()


def content(**shapes: tuple[int, ...]) -> Content:
    specs = [TensorSpec(name.replace("__", "."), shape, "float32", 4) for name, shape in shapes.items()]
    return Content(tuple(sorted(specs)), {}, {}, ({},), {}, "")


LAYERS = content(
    decoder__layers__self_attention__linear_qkv__weight=(8, 12, 4),
    decoder__layers__mlp__linear_fc1__weight=(8, 16, 4),
    decoder__layers__mlp__linear_fc2__weight=(8, 4, 8),
)


def boxes(placer: Placer, name: str, rank: int) -> list[str]:
    part = placer.part(name, rank)
    return [] if part is None else [str(box) for box, _ in part.boxes]


def test_interleaved_stages_have_a_run_of_layers_for_each_chunk() -> None:
    placer = Placer(LAYERS, Layout(pp=2, vpp=2, tp=2))
    fc1 = "decoder.layers.mlp.linear_fc1.weight"
    assert boxes(placer, fc1, 3) == [
        "[2:4, 4:8, 0:4]",
        "[2:4, 12:16, 0:4]",
        "[6:8, 4:8, 0:4]",
        "[6:8, 12:16, 0:4]",
    ]
    part = placer.part(fc1, 3)
    assert part is not None and part.shape == (4, 8, 4)
    assert [str(inner) for _, inner in part.boxes] == [
        "[0:2, 0:4, 0:4]",
        "[0:2, 4:8, 0:4]",
        "[2:4, 0:4, 0:4]",
        "[2:4, 4:8, 0:4]",
    ]
    assert boxes(placer, "decoder.layers.mlp.linear_fc2.weight", 0) == ["[0:2, 0:4, 0:4]", "[4:6, 0:4, 0:4]"]


def test_numbered_layers_belong_to_stages() -> None:
    names = {f"m__decoder__layers__{n}__self_attention__linear_proj__weight": (4, 8) for n in range(4)}
    placer = Placer(content(**names), Layout(pp=2, tp=2))
    held = [[n for n in range(4) if placer.part(sorted(placer.specs)[n], rank)] for rank in range(4)]
    assert held == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert boxes(placer, "m.decoder.layers.3.self_attention.linear_proj.weight", 3) == ["[0:4, 4:8]"]
    interleaved = Placer(content(**names), Layout(pp=2, vpp=2))
    assert [bool(interleaved.part(name, 0)) for name in sorted(interleaved.specs)] == [True, False, True, False]


def test_a_flat_optimizer_state_of_megatron_lies_where_its_parameter_does() -> None:
    names = {
        "optimizer__state__exp_avg__decoder__layers__mlp__linear_fc1__weight": (4, 12, 4),
        "optimizer__state__exp_avg__decoder__layers__mlp__linear_fc2__weight": (4, 4, 12),
        "optimizer__state__exp_avg__embedding__word_embeddings__weight": (10, 4),
    }
    placer = Placer(content(**names), Layout(pp=2, tp=2))
    assert boxes(placer, "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight", 1) == ["[0:2, 6:12, 0:4]"]
    assert boxes(placer, "optimizer.state.exp_avg.embedding.word_embeddings.weight", 2) == ["[0:5, 0:4]"]


def test_given_rules_come_first_and_cut_as_torch_chunk_does() -> None:
    state = content(w=(10, 6), b=(10,), s=())
    given = [Given.parse("w=0:dp,1:tp"), Given.parse("b=0:dp"), Given.parse("s=last")]
    placer = Placer(state, Layout(tp=2, dp=4), given)
    assert [boxes(placer, "w", r) for r in (1, 6, 7)] == [["[0:3, 3:6]"], ["[9:10, 0:3]"], ["[9:10, 3:6]"]]
    assert boxes(placer, "b", 4) == ["[6:9]"] and placer.rules["s"].stages == {0}
    wide = Placer(content(w=(2,)), Layout(dp=4), [Given.parse("w=0:dp")])
    assert [bool(wide.part("w", r)) for r in range(4)] == [True, True, False, False]
    assert Placer(state, Layout(tp=2)).rules["w"].what == NO_RULE


@pytest.mark.parametrize("text", ["w", "=0:tp", "w=", "w=0:xp", "w=tp:0", "w=0:tp,", "w=replicated,0:tp", "w=-1:tp"])
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(CkptError, match="PATTERN=HOW"):
        Given.parse(text)


def test_what_cannot_be_cut_is_refused_with_its_name() -> None:
    fc1 = "decoder.layers.mlp.linear_fc1.weight"
    without = Content(tuple(t for t in LAYERS.tensors if "fc2" not in t.name), {}, {}, ({},), {}, "")
    with pytest.raises(Unsupported, match=f"{fc1}: whether gate and up"):
        Placer(without, Layout(tp=2))
    Placer(without, Layout(pp=2))
    with pytest.raises(Unsupported, match=r"linear_qkv.weight: axis 1 cannot be cut over tp"):
        plan_files(LAYERS, Placer(LAYERS, Layout(tp=8)))
    with pytest.raises(Unsupported, match=r"axis 0 cannot be cut over pp.*--shard"):
        plan_files(LAYERS, Placer(LAYERS, Layout(pp=3)))
    numbered = content(decoder__layers__0__w=(2,), decoder__layers__2__w=(2,))
    with pytest.raises(Unsupported, match="3 layers cannot be shared evenly by 2"):
        Placer(numbered, Layout(pp=2))
    with pytest.raises(CkptError, match="no axis 3"):
        Placer(LAYERS, Layout(tp=2), [Given.parse(f"{fc1}=3:tp")])
    with pytest.raises(CkptError, match="no tensor has such a name"):
        Placer(LAYERS, Layout(tp=2), [Given.parse("nobody=0:tp")])
    together = Placer(content(w=(4, 4)), Layout(dp=2, ep=2), [Given.parse("w=0:dp,1:ep")])
    with pytest.raises(Unsupported, match=r"w: no rank holds .*--shard"):
        plan_files(content(w=(4, 4)), together)
    with pytest.raises(Unsupported, match="cut twice"):
        plan_files(LAYERS, Placer(LAYERS, Layout(pp=2, vpp=2, dp=2), [Given.parse(f"{fc1}=0:pp,0:dp")]))
