"""Checkpoints through every pair of layouts, and through random chains of them, with every bit compared.

    ./tools/layouts                  all pairs of the dense model's layouts, then chains, in a temporary directory
    ./tools/layouts --s3             the same on a real S3 server (SeaweedFS) that runs for the time of the tool
    ./tools/layouts --family all     mixture of experts, tied embeddings, bfloat16 and the others too
    ./tools/layouts --no-pairs --chains 10 --stops 8 --seed 7

A small real Megatron Core model and AdamW hold labelled bits. For the pairs, each layout saves them, and in fresh
processes each layout loads what every layout saved. In a chain, each stop is a job of fresh processes with another
random init on a layout drawn by chance: it loads the stop before it, compares every rank's every tensor with plain
slicing of the labelled state, and saves again. The last stop is on the first layout. Every save must give one state
id, and the same files byte for byte. Exits with 1 if anything differs.
"""

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tests.support, which is not installed

from ckpt import Layout
from tests.support.layouts import FAMILIES, Stop, Visits, attempts, different, faults, tour
from tests.support.roots import Root
from tests.support.s3 import S3Server


def below(root: Root, *parts: object) -> Root:
    return replace(root, url="/".join([root.url, *map(str, parts)]))


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- Every pair ---


def pairs(family: str, base: Root) -> list[str]:
    """Prints a table of what each layout saved, and who loaded it with the right bits. Gives what was wrong."""
    size, layouts = FAMILIES[family].size, FAMILIES[family].layouts
    roots = [below(base, "pairs", family, layout) for layout in layouts]
    tell(f"{family}: saving on {len(layouts)} layouts")
    saves = [Stop(layout, size, root, save=True) for layout, root in zip(layouts, roots, strict=True)]
    saved = tour(saves)
    tell(f"{family}: loading {len(layouts)} x {len(layouts)} in fresh processes")
    loads = [
        Stop(layout, size, root, load=True, seed=100 + number)
        for layout in layouts
        for number, root in enumerate(roots)
    ]
    loaded = tour(loads)

    trees = [attempts(root)[0] for root in roots]
    wrong = faults(saves, saved) + faults(loads, loaded)
    width = max(len(str(layout)) for layout in layouts)
    print(f"\n{family}: row saved, column loaded; = all bits right, X not")
    numbers = " ".join(f"{number:>2}" for number in range(1, len(layouts) + 1))
    print(f"{'':>2}  {'saved on':<{width}}  ranks  {'state id':<12}  {'files':<9}  {numbers}")
    for row, layout in enumerate(layouts):
        differ = different(trees[row], trees[0])
        wrong += [f"{family}: {layout} and {layouts[0]} wrote different {name}" for name in differ]
        state_id = saved[row][0].saved or "-"
        if state_id != saved[0][0].saved:
            wrong.append(f"{family}: {layout} and {layouts[0]} gave different state ids")
        cells = []
        for column in range(len(layouts)):
            number = column * len(layouts) + row
            good = not faults(loads[number : number + 1], loaded[number : number + 1])
            good = good and loaded[number][0].loaded == state_id
            cells.append(" =" if good else " X")
            if not good:
                wrong.append(f"{family}: saved on {layout}, loaded on {layouts[column]}: not the same state")
        files = f"{len(differ)} differ" if differ else "the same"
        print(f"{row + 1:>2}  {layout!s:<{width}}  {layout.world:>5}  {state_id[:12]}  {files:<9}  {' '.join(cells)}")
    sys.stdout.flush()
    return wrong


# --- Chains ---


def draw(layouts: Sequence[Layout], stops: int, chance: random.Random) -> list[Layout]:
    """A chain of layouts in which neighbours differ and the last is the first."""
    chain = [chance.choice(layouts)]
    while len(chain) < stops - 1:
        others = [layout for layout in layouts if layout != chain[-1]]
        if len(chain) == stops - 2 and len(others) > 1:
            others = [layout for layout in others if layout != chain[0]]
        chain.append(chance.choice(others))
    return [*chain, chain[0]]


def follow(title: str, family: str, chain: Sequence[Layout], root: Root) -> list[str]:
    """One job after the other on the same root, a line for each. Gives what was wrong."""
    print(f"\n{title}, {family}: {' > '.join(map(str, chain))}")
    width = max(len(str(layout)) for layout in chain)
    print(f"step  {'layout':<{width}}  ranks  {'loaded':<12}  {'saved':<12}  {'files':<9}  seconds", flush=True)
    wrong: list[str] = []
    first: Visits = []
    for number, layout in enumerate(chain):
        stop = Stop(layout, FAMILIES[family].size, root, load=number > 0, save=True, seed=200 + number)
        [seen] = tour([stop])
        first = first or seen
        mine = seen[0]
        trees = attempts(root)
        differ = different(trees[-1], trees[0])
        wrong += faults([stop], [seen]) + [f"{title}: stop {number + 1} wrote a different {name}" for name in differ]
        if mine.saved != first[0].saved or (number > 0 and mine.loaded != first[0].saved) or mine.step != number + 1:
            wrong.append(f"{title}: stop {number + 1} on {layout} did not load and save the first state")
        files = f"{len(differ)} differ" if differ else "the same"
        ids = f"{(mine.loaded or '-')[:12]:<12}  {(mine.saved or '-')[:12]:<12}"
        print(f"{mine.step or 0:>4}  {layout!s:<{width}}  {layout.world:>5}  {ids}  {files:<9}  {mine.seconds:7.2f}")
        sys.stdout.flush()
    return wrong


def run(args: argparse.Namespace, base: Root) -> list[str]:
    """All that was asked for. Gives what was wrong."""
    families = list(FAMILIES) if "all" in args.family else args.family
    wrong: list[str] = []
    if args.pairs:
        for family in families:
            wrong += pairs(family, base)
    chance = random.Random(args.seed)
    for number in range(1, args.chains + 1):
        family = families[(number - 1) % len(families)]
        chain = draw(FAMILIES[family].layouts, args.stops, chance)
        wrong += follow(f"chain {number}", family, chain, below(base, "chains", number))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Save and load on every pair of layouts and on random chains of them.")
    parser.add_argument("--s3", action="store_true", help="a real S3 server instead of a directory")
    parser.add_argument("--dir", type=Path, help="keep all in this new directory (default: a temporary one)")
    parser.add_argument(
        "--family",
        action="append",
        choices=[*FAMILIES, "all"],
        help="which model; may be given several times (default: dense)",
    )
    parser.add_argument("--no-pairs", dest="pairs", action="store_false", help="only chains")
    parser.add_argument("--chains", type=int, default=2, metavar="N", help="how many random chains (default: 2)")
    parser.add_argument("--stops", type=int, default=5, metavar="N", help="stops of a chain, 3 or more (default: 5)")
    parser.add_argument("--seed", type=int, help="of the chains (default: drawn by chance and printed)")
    args = parser.parse_args()
    args.family = args.family or ["dense"]
    if args.stops < 3 or args.chains < 0:
        parser.error("a chain has at least 3 stops: there, another layout, and back")
    if args.dir is not None and (args.s3 or args.dir.exists()):
        parser.error("--dir names a directory that does not exist yet, and goes without --s3")
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1_000_000)

    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        if args.s3:
            server = stack.enter_context(S3Server())
            base = Root(server.url("layouts"), server.storage_options)
        elif args.dir is not None:
            base = Root(str(args.dir.resolve()))
        else:
            base = Root(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-layouts-")))
        print(f"Checkpoints go to {base.url}; the seed of the chains is {args.seed}", flush=True)
        wrong = run(args, base)
    seconds = time.monotonic() - began
    if wrong:
        print("\n" + "\n".join(wrong))
        print(f"\n{len(wrong)} differences, after {seconds:.0f} s.")
        return 1
    print(f"\nEvery rank's every tensor had the right bits, every save the same files and state id. {seconds:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
