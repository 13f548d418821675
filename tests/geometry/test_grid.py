"""The canonical grid: limits, tiling, stacking, huge shapes, and object sizes against files that TensorStore writes."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.geometry import Box, Catalogue, Grid, StoredArray, TensorSpec, canonical_grid
from ckpt.state.dtypes import STORED
from ckpt.store.arrays import Arrays, array_folder, context, expected_objects
from tests.geometry.partitions import counts

MIB = 1 << 20
Index = tuple[int, ...]


def by_the_rule(shape: Index, itemsize: int, stack: int) -> Grid:
    """The rule of the docstring, worked out from the list of all successive cells."""
    full = [max(1, n) for n in shape]
    start = [1 if i < stack and math.prod(full[i + 1 :]) * itemsize >= MIB else n for i, n in enumerate(full)]
    halvings = [[0] * len(shape)]

    def cell(j: int) -> list[int]:
        return [math.ceil(n / 2**h) for n, h in zip(start, halvings[j], strict=True)]

    while any(n > 1 for n in cell(-1)):
        longer = [i for i, n in enumerate(cell(-1)) if n > 64] or [i for i, n in enumerate(cell(-1)) if n > 1]
        axis = sorted(longer, key=lambda i: (halvings[-1][i], i))[0]
        halvings.append([h + (i == axis) for i, h in enumerate(halvings[-1])])

    def size(extent: list[int]) -> int:
        return math.prod(extent) * itemsize

    def enough(j: int) -> bool:
        last = list(zip(cell(j), halvings[j], strict=True))[-2:]
        return size(cell(j)) <= 4 * MIB or all(h >= 3 or n <= 64 for n, h in last)

    outer = next(j for j in range(len(halvings)) if size(cell(j)) <= 16 * MIB and enough(j))
    inner = next(j for j in range(outer, len(halvings)) if size(cell(j)) <= 2 * MIB)

    def whole(j: int) -> list[int]:
        return [n * 2 ** (h - o) for n, h, o in zip(cell(inner), halvings[inner], halvings[j], strict=True)]

    outer = next(j for j in range(outer, len(halvings)) if size(whole(j)) <= 16 * MIB)
    return Grid(shape, tuple(whole(outer)), tuple(cell(inner)))


@st.composite
def big_shapes(draw: st.DrawFn) -> Index:
    """Shapes of up to about 2^34 elements, long axes and short ones, zero among them."""
    ndim = draw(st.integers(0, 5))
    top = max(1, 34 // max(1, ndim))
    return tuple(
        draw(st.one_of(st.integers(0, 70), st.integers(1, 2**top), st.sampled_from([63, 64, 65, 128, 129])))
        for _ in range(ndim)
    )


@settings(max_examples=150)
@given(big_shapes(), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 2))
def test_grids_follow_the_rule_and_keep_the_limits(shape: Index, itemsize: int, stack: int) -> None:
    stack = min(stack, len(shape))
    grid = canonical_grid(shape, itemsize, stack)
    assert grid == by_the_rule(shape, itemsize, stack)
    assert math.prod(grid.chunk) * itemsize <= 2 * MIB
    assert math.prod(grid.cell) * itemsize <= 16 * MIB
    for cell, chunk in zip(grid.cell, grid.chunk, strict=True):
        assert cell in {chunk << k for k in range(6)}
    for axis in range(stack):
        if math.prod(max(1, n) for n in shape[axis + 1 :]) * itemsize >= MIB:
            assert (grid.cell[axis], grid.chunk[axis]) == (1, 1)


@given(st.integers(8, 40), st.integers(8, 40), st.sampled_from([MIB // 8, MIB // 2, MIB, 2 * MIB, 16 * MIB]))
def test_limits_hold_also_when_rounding_up_would_break_them(n: int, m: int, itemsize: int) -> None:
    grid = canonical_grid((n, m), itemsize)
    assert math.prod(grid.chunk) * itemsize <= 2 * MIB or grid.chunk == (1, 1)
    assert math.prod(grid.cell) * itemsize <= 16 * MIB


def test_an_object_rounded_up_past_16_mib_is_cut_once_more() -> None:
    assert canonical_grid((2050 * 8, 2045 * 8), 4) == Grid((16400, 16360), (1026, 2048), (513, 512))
    assert math.prod(canonical_grid((3,) * 15, 1).cell) <= 16 * MIB


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 2)), max_size=3),
    st.sampled_from([1, 2, 8]),
)
def test_cells_and_their_chunks_tile_the_array(axes: list[tuple[int, int, int]], itemsize: int) -> None:
    shape = tuple(n for n, _, _ in axes)
    grid = Grid(shape, tuple(k << p for _, k, p in axes), tuple(k for _, k, _ in axes))
    cells = list(grid.cells())
    assert (counts([box for _, box in cells], shape) == 1).all()
    assert [index for index, _ in cells] == list(itertools.product(*map(range, grid.counts)))
    for index, box in cells:
        assert box.offset == tuple(i * c for i, c in zip(index, grid.cell, strict=True))
        chunks = list(grid.chunks_of(box))
        assert all(box.contains(chunk) for chunk in chunks)
        assert (counts(chunks, shape)[box.slices] == 1).all()
        assert sum(chunk.volume for chunk in chunks) == box.volume
        for chunk in chunks:
            assert all(o % k == 0 for o, k in zip(chunk.offset, grid.chunk, strict=True))
            assert all(e <= k for e, k in zip(chunk.extent, grid.chunk, strict=True))


@given(st.lists(st.integers(0, 30), max_size=3).map(tuple), st.sampled_from([1 << 13, 1 << 16, 1 << 18, 1 << 21]))
def test_canonical_cells_and_chunks_tile_the_array(shape: Index, itemsize: int) -> None:
    """Elements of 8 KiB to 2 MiB make objects of few elements, which can be counted one by one."""
    grid = canonical_grid(shape, itemsize)
    cells = [box for _, box in grid.cells()]
    assert (counts(cells, shape) == 1).all()
    assert (counts([chunk for box in cells for chunk in grid.chunks_of(box)], shape) == 1).all()


HUGE: list[tuple[Index, int]] = [
    ((70000, 70000), 4),
    ((2**31 + 7,), 1),
    ((3, 70000, 70000), 4),
    ((5000, 3000, 4001), 2),
    ((2**33 + 1, 2), 1),
    ((2**40,), 8),
]


@pytest.mark.parametrize(("shape", "itemsize"), HUGE, ids=str)
def test_huge_shapes_without_memory(shape: Index, itemsize: int) -> None:
    grid = canonical_grid(shape, itemsize)
    assert math.prod(grid.chunk) * itemsize <= 2 * MIB
    assert math.prod(grid.cell) * itemsize <= 16 * MIB
    assert all(0 <= n - c * (k - 1) <= c for n, c, k in zip(shape, grid.cell, grid.counts, strict=True))
    if math.prod(grid.counts) < 20000:
        volume = 0
        for index, box in grid.cells():
            volume += box.volume
            assert box.offset == tuple(i * c for i, c in zip(index, grid.cell, strict=True))
        assert volume == math.prod(shape)
        assert box.stop == shape, "the last object ends where the tensor ends"
        *_, last = grid.chunks_of(box)
        assert last.stop == shape


def test_huge_grids_by_hand() -> None:
    """70000 in 11 halvings of both axes (6 and 5): 1094 x 2188 x 4 bytes; 3 more to at most 2 MiB: 547 x 547."""
    assert canonical_grid((70000, 70000), 4) == Grid((70000, 70000), (1094, 2188), (547, 547))
    assert canonical_grid((3, 70000, 70000), 4, stack=1).cell == (1, 1094, 2188)
    seven = canonical_grid((2**31 + 7,), 1)
    assert seven.chunk == (2**20 + 1,)
    assert seven.cell == (8 * (2**20 + 1),)


def test_scalar_empty_and_small_arrays() -> None:
    assert canonical_grid((), 16) == Grid((), (), ())
    assert list(canonical_grid((), 16).cells()) == [((), Box((), ()))]
    assert canonical_grid((3, 0, 2), 4) == Grid((3, 0, 2), (3, 1, 2), (3, 1, 2))
    assert list(canonical_grid((3, 0, 2), 4).cells()) == []
    assert canonical_grid((7, 5), 4).cell == (7, 5)


@pytest.mark.parametrize(
    ("shape", "itemsize"),
    [((12288, 12288), 2), ((28672, 8192), 4), ((16384, 5120), 4), ((49152, 12288), 2)],
    ids=str,
)
def test_tp_8_by_row_or_column_cuts_no_object_of_real_weights(shape: Index, itemsize: int) -> None:
    cells = [box for _, box in canonical_grid(shape, itemsize).cells()]
    for axis in (0, 1):
        part = shape[axis] // 8
        crossing = [b for b in cells if b.offset[axis] // part != (b.stop[axis] - 1) // part]
        assert crossing == []


def test_pp_cuts_no_object_of_stacked_layers() -> None:
    grid = canonical_grid((48, 4096, 4096), 2, stack=1)
    assert grid.cell[0] == 1
    experts = canonical_grid((4, 8, 2048, 1024), 2, stack=2)
    assert experts.cell[:2] == (1, 1)
    norms = canonical_grid((48, 4096), 2, stack=1)
    assert norms.cell == (48, 4096), "slices under 1 MiB are kept together"


@pytest.mark.parametrize(
    ("shape", "cell", "chunk"),
    [((4,), (3,), (2,)), ((4,), (6,), (2,)), ((4,), (2,), (0,)), ((0,), (0,), (1,)), ((-1,), (1,), (1,))],
)
def test_malformed_grids_are_refused(shape: Index, cell: Index, chunk: Index) -> None:
    with pytest.raises(ValueError, match="grid"):
        Grid(shape, cell, chunk)


DTYPES = {
    "uint8": np.uint8,
    "float16": np.float16,
    "float32": np.float32,
    "int64": np.int64,
    "complex128": np.complex128,
}


@st.composite
def small_arrays(draw: st.DrawFn) -> tuple[str, Grid]:
    axes = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(0, 2)), max_size=3))
    shape, chunk = tuple(n for n, _, _ in axes), tuple(k for _, k, _ in axes)
    cell = tuple(k << p for _, k, p in axes)
    return draw(st.sampled_from(sorted(DTYPES))), Grid(shape, cell, chunk)


@settings(max_examples=25)
@given(st.lists(small_arrays(), min_size=4, max_size=4))
def test_object_bytes_are_the_sizes_of_the_files_tensorstore_writes(
    tmp_path_factory: pytest.TempPathFactory, arrays: list[tuple[str, Grid]]
) -> None:
    root = tmp_path_factory.mktemp("store")
    specs, stored = [], []
    for number, (dtype, grid) in enumerate(arrays):
        specs.append(TensorSpec(f"t{number}", grid.shape, dtype, STORED[dtype].itemsize))
        stored.append(StoredArray(dtype, STORED[dtype].itemsize, False, grid, ((number, 0),)))
    catalogue = Catalogue(tuple(specs), tuple(stored))
    ctx = context(1, sync=False)
    handles = Arrays({"driver": "file", "path": f"{root}/"}, "state/", catalogue, ctx)
    for number, array in enumerate(stored):
        values: np.ndarray = (
            np.arange(math.prod(array.grid.shape)).reshape(array.grid.shape).astype(DTYPES[array.dtype])
        )
        for _, box in array.grid.cells():
            handles.handle(number)[box.slices].write(values[box.slices]).result()
    expected = expected_objects(catalogue)
    assert files_below(root / "state") == expected
    assert len(expected) == sum(math.prod(array.grid.counts) for array in stored)
    assert all(key.startswith(tuple(array_folder(catalogue, a) + "/c" for a in stored)) for key in expected)


def files_below(root: Path) -> dict[str, int]:
    return {p.relative_to(root).as_posix(): p.stat().st_size for p in root.rglob("*") if p.is_file()}


def test_catalogue_packs_small_tensors_and_stores_each_element_once() -> None:
    """Sizes around 64 KiB and enough small tensors to fill several 4 MiB objects of a packed array."""
    specs = [TensorSpec(f"n{i:03}", (16383 - i % 7,), "float32", 4) for i in range(200)]
    specs += [
        TensorSpec("edge", (16384,), "float32", 4),
        TensorSpec("s", (), "int64", 8),
        TensorSpec("z", (0, 3), "int64", 8),
    ]
    specs += [TensorSpec("wide", (70, 16), "complex128", 16)]
    catalogue = Catalogue.of(specs[::-1])
    assert catalogue == Catalogue.of(specs)
    assert [t.name for t in catalogue.tensors] == sorted(s.name for s in specs)
    own = [catalogue.tensors[a.tensors[0][0]].name for a in catalogue.arrays if not a.packed]
    assert own == ["edge"]
    seen: dict[int, int] = {}
    for o in catalogue.objects():
        array = catalogue.arrays[o.array]
        assert o.box.volume * array.itemsize <= (4 * MIB if array.packed else 16 * MIB)
        end = 0
        for tensor, box, start in o.pieces:
            assert array.dtype == catalogue.tensors[tensor].dtype
            assert end <= start
            end = start + box.volume
            seen[tensor] = seen.get(tensor, 0) + box.volume
        assert end <= o.box.volume
    for i, spec in enumerate(catalogue.tensors):
        assert seen.get(i, 0) == math.prod(spec.shape), spec.name
    packed = [a for a in catalogue.arrays if a.packed and a.dtype == "float32"]
    assert len(packed) == 1
    assert packed[0].grid.counts == (4,)


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="one name"):
        Catalogue.of([TensorSpec("a", (1,), "float32", 4), TensorSpec("a", (2,), "float32", 4)])
