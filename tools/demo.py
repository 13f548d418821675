"""The main job: save on one parallel layout, be killed in mid-save, resume on two others, bit for bit.

    ./tools/demo            checkpoints on a real S3 server (SeaweedFS) that runs for the time of the demo
    ./tools/demo --local    checkpoints in a temporary directory

A small Megatron Core GPT learns to write Python from the standard library's sources, on CPU with gloo:

1. 4 processes as TP2 x PP2 train and save, and are all killed with SIGKILL while a save is under way;
2. 2 processes as DP2 resume from what was committed, train on, save;
3. 4 processes as TP4 resume from that, train on, save;
4. zarr-python, which knows nothing of ckpt, opens the last checkpoint;
5. a run with invariant numerics changes its layout, loses processes, and has the same losses as one that never stopped.

This process starts the workers (itself, as `demo.py worker`), reads the JSON lines of rank 0 and checks them.
"""

import argparse
import contextlib
import faulthandler
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for tests.support, which is not installed

from tests.support.ports import free_ports  # noqa: E402
from tests.support.s3 import S3Server  # noqa: E402
from tools.demo_finale import NotTheSame, finale  # noqa: E402

EVERY = 4  # steps between saves
KILL_FROM = 12  # the first step whose save may be killed
GIVE_UP = 40  # a run that could not be killed in mid-save by this step is a failure of the demo
PATIENCE = 300  # seconds for one run, which takes about ten on a free machine
OPTIONS = "CKPT_DEMO_STORAGE_OPTIONS"  # carries the storage options (with their secret) to the workers

Event = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A layout of the demo."""

    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp


class Failed(Exception):
    """Something that the demo shows did not hold."""


# --- A worker: one rank ---


def work(args: argparse.Namespace) -> None:
    """Resume from the newest checkpoint if there is one, train until the given step, save every few steps."""
    faulthandler.register(signal.SIGUSR1)
    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist

    import ckpt
    from tests.support.gpt_oracle import GptSize
    from tests.support.megatron_cpu import megatron_on_cpu
    from tests.support.tiny_gpt import parallel, raw_bytes
    from tests.support.training import make_trainer, train_step

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    out = sys.stdout
    sys.stdout = sys.stderr

    def tell(event: str, **facts: Any) -> None:
        if dist.get_rank() == 0:
            print(json.dumps({"event": event, **facts}), file=out, flush=True)

    size = GptSize(layers=4, hidden=128, heads=8, kv_groups=4, seq=64)
    with parallel(args.tp, args.pp, args.dp):
        with megatron_on_cpu():  # from here on only training needs it: ckpt works on what is there
            trainer = make_trainer(size, seed=args.seed)
        state = {"model": trainer.model, "optimizer": trainer.optimizer, "step": 0, "loss": 0.0}
        layout = ckpt.Layout(tp=args.tp, pp=args.pp, dp=args.dp)
        options = json.loads(os.environ[OPTIONS])
        with ckpt.Checkpointer(args.url, layout=layout, storage_options=options) as ck:
            restored = ck.load(state)
            if restored is not None:
                proof = {"verified": restored.verified, "tensors": restored.tensors}
                tell("loaded", **_facts(restored), **proof, loss=state["loss"], visible=list(ck.steps()))
            for step in range(int(state["step"]) + 1, args.until + 1):
                with megatron_on_cpu():
                    loss = train_step(trainer, step)
                tell("trained", step=step, loss=loss)
                if step % EVERY == 0:
                    state |= {"step": step, "loss": loss}
                    tell("saving", step=step)
                    receipt = ck.save(step, state)
                    rows = dict(trainer.model.named_parameters()).get("embedding.word_embeddings.weight")
                    seen = None if rows is None else [len(rows), hashlib.sha256(raw_bytes(rows)).hexdigest()]
                    tell("saved", **_facts(receipt), loss=loss, rows=seen)
            tell("done", visible=list(ck.steps()))
    dist.barrier()
    dist.destroy_process_group()


def _facts(outcome: Any) -> Event:
    """What a Receipt and a Restored have in common."""
    return {
        "step": outcome.step,
        "state_id": outcome.state_id,
        "bytes": outcome.bytes,
        "seconds": outcome.seconds,
    }


# --- The launcher ---


class Job:
    """The processes of one run. `events()` yields what rank 0 says; leaving the context ends what runs on."""

    def __init__(self, shape: Shape, url: str, until: int, seed: int, env: Mapping[str, str], logs: Path) -> None:
        self.shape = shape
        self._logs = [logs / f"{shape.name.replace(' ', '')}-{rank}.log" for rank in range(shape.world)]
        self._lines: queue.Queue[Event | None] = queue.Queue()
        command = [sys.executable, str(Path(__file__).resolve()), "worker", "--url", url]
        for name in ("tp", "pp", "dp"):
            command += [f"--{name}", str(getattr(shape, name))]
        command += ["--until", str(until), "--seed", str(seed)]
        port = free_ports(1)[0]
        self._processes = []
        for rank, path in enumerate(self._logs):
            rank_env = {
                **os.environ,
                **env,
                "RANK": str(rank),
                "WORLD_SIZE": str(shape.world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
            }
            stdout = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            with path.open("wb") as log:
                self._processes.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=log, env=rank_env)
                )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        stream = self._processes[0].stdout
        assert stream is not None
        for line in stream:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def events(self) -> Iterator[Event]:
        """Ends when the run has ended well. Raises Failed if a process fails or all take too long."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                event = self._lines.get(timeout=0.5)
            except queue.Empty:
                if time.monotonic() > deadline:
                    self.signal(signal.SIGUSR1)  # every worker writes its stack to its log
                    time.sleep(1)
                    stacks = "\n".join(_tail(path, 25) for path in self._logs)
                    raise Failed(f"the {self.shape.name} run is not done after {PATIENCE} s:\n{stacks}") from None
                if any(process.poll() for process in self._processes):
                    break
                continue
            if event is None:
                break
            yield event
        for process, path in zip(self._processes, self._logs, strict=True):
            code = _wait(process)
            if code:
                raise Failed(f"a process of the {self.shape.name} run ended with code {code}:\n{_tail(path, 15)}")

    def signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def _tail(path: Path, lines: int) -> str:
    return "\n".join([f"{path.stem}:", *path.read_text(errors="replace").splitlines()[-lines:]])


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(20)
    return None


class Store:
    """The root of the checkpoints, seen through fsspec alone."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        import fsspec

        self.url = url
        self.fsspec_options: dict[str, Any] = {}
        if options:
            self.fsspec_options = {
                "key": options["access_key"],
                "secret": options["secret_key"],
                "client_kwargs": {"endpoint_url": options["endpoint"], "region_name": options["region"]},
                "config_kwargs": {
                    "request_checksum_calculation": "when_required",
                    "response_checksum_validation": "when_required",
                },
                "use_listings_cache": False,
            }
        self._fs, self._root = fsspec.core.url_to_fs(url, **self.fsspec_options)

    def keys(self, folder: str) -> list[str]:
        """Every object below a folder of the root, relative to the folder."""
        start = f"{self._root}/{folder}"
        with contextlib.suppress(FileNotFoundError):
            return [path[len(start) + 1 :] for path in self._fs.find(start)]
        return []

    def commits(self) -> list[Event]:
        """The commit records of the log, oldest first."""
        records = [json.loads(self._fs.cat_file(f"{self._root}/log/{n}")) for n in sorted(self.keys("log"))]
        return [record for record in records if record["kind"] == "commit"]


def kill_in_mid_save(job: Job, store: Store, before: set[str]) -> str | None:
    """Wait until the save that was announced writes data, then kill every process. Gives what that left.

    From the moment the new attempt shows, the processes run for some milliseconds at a time and are stopped in
    between, to look at the store while nothing moves. Where the save gets through all the same (all receipts
    are there, so that the next job would complete it) they go on, and None comes back.
    """

    def written() -> list[str]:
        return [key for key in store.keys("attempts") if _attempt(key) not in before]

    deadline = time.monotonic() + 60
    while not written():
        if time.monotonic() > deadline:
            raise Failed("a save was announced, but no attempt appeared in the store")
    while True:
        job.signal(signal.SIGSTOP)
        time.sleep(0.1)  # requests that are under way arrive
        keys = written()
        data = [key for key in keys if "/state/" in key and "/c/" in key]
        receipts = [key for key in keys if "/receipts/" in key]
        if len(receipts) == job.shape.world:
            job.signal(signal.SIGCONT)
            return None
        if data:
            job.signal(signal.SIGKILL)
            return f"{len(data)} data objects, {len(receipts)} of {job.shape.world} receipts, no commit"
        job.signal(signal.SIGCONT)
        time.sleep(0.03)


def _attempt(key: str) -> str:
    """claim/attempt of an object below attempts/."""
    return "/".join(key.split("/")[:2])


# --- The story ---


class Story:
    """Runs the acts, prints the table, and checks what it prints."""

    def __init__(self, url: str, options: Mapping[str, str], env: Mapping[str, str], logs: Path) -> None:
        self.url, self.options, self.logs = url, options, logs
        self.env = {**env, OPTIONS: json.dumps(dict(options) or None)}
        self.store = Store(url, options)
        self.saved: dict[int, Event] = {}  # by step: the newest receipt
        self.losses: dict[int, float] = {}  # by step: what the first run to reach it had
        self.furthest = 0.0  # largest relative difference of a loss from another layout's

    def row(self, step: int, shape: Shape, state_id: str, loss: float, text: str) -> None:
        print(f"{step:>4}  {shape.name:<9}  {state_id[:12]:<12}  {loss:<8.5f}  {text}", flush=True)

    def run(self, shape: Shape, until: int, seed: int, kill: bool = False) -> None:
        """One run: from the newest checkpoint to a step, or until it is killed in mid-save."""
        with Job(shape, self.url, until, seed, self.env, self.logs) as job:
            before = {_attempt(key) for key in self.store.keys("attempts")}
            for event in job.events():
                kind = event.pop("event")
                if kind == "loaded":
                    self.loaded(shape, event)
                elif kind == "trained":
                    self.trained(event)
                elif kind == "saving" and kill and event["step"] >= KILL_FROM:
                    left = kill_in_mid_save(job, self.store, before)
                    if left is not None:
                        text = f"{shape.world} processes killed with SIGKILL in mid-save: {left}"
                        self.row(event["step"], shape, "-", self.losses[event["step"]], text)
                        return
                elif kind == "saved":
                    before = {_attempt(key) for key in self.store.keys("attempts")}
                    self.saved[event["step"]] = event
                    self.row(event["step"], shape, event["state_id"], event["loss"], f"saved {_size(event)}")
                elif kind == "done":
                    self.expect_visible(event["visible"])
        if kill:
            raise Failed("every save was over before it could be killed")

    def loaded(self, shape: Shape, event: Event) -> None:
        newest = max(self.saved)
        receipt = self.saved[newest]
        if (event["step"], event["state_id"]) != (newest, receipt["state_id"]):
            raise Failed(f"loaded {event['step']} {event['state_id']}, but saved {newest} {receipt['state_id']}")
        if event["loss"] != receipt["loss"]:
            raise Failed(f"the loss in the state is {event['loss']}, not {receipt['loss']}")
        if not event["verified"]:
            raise Failed("the load did not verify what it loaded")
        self.expect_visible(event["visible"])
        text = f"load verified {event['tensors']} tensors, {_size(event)}; state id as saved"
        self.row(event["step"], shape, event["state_id"], event["loss"], text)

    def trained(self, event: Event) -> None:
        step, loss = event["step"], event["loss"]
        first = self.losses.setdefault(step, loss)
        self.furthest = max(self.furthest, abs(loss - first) / first)
        if self.furthest > 1e-3:
            raise Failed(f"step {step} has loss {loss} here, and had {first} before the kill")

    def expect_visible(self, steps: list[int]) -> None:
        """A killed save must not be among the steps, everything committed must."""
        if sorted(steps) != sorted(self.saved):
            raise Failed(f"steps() gives {steps}, but {sorted(self.saved)} were committed")

    def open_with_zarr(self) -> None:
        """List the newest checkpoint with zarr-python, and compare one tensor with what the trainer held."""
        import numpy as np
        import zarr

        commit = self.store.commits()[-1]
        path = f"attempts/{commit['claim']}/{commit['attempt']}/state"
        group = zarr.open_group(f"{self.url}/{path}", mode="r", storage_options=self.store.fsspec_options or None)
        folders = sorted(key.removesuffix("/zarr.json") for key in self.store.keys(path) if key.endswith("/zarr.json"))
        opened = [(folder, group[folder]) for folder in folders]
        arrays = [(name, array) for name, array in opened if isinstance(array, zarr.Array)]
        print(f"\nzarr-python {zarr.__version__} opens step {commit['step']}: {len(arrays)} arrays, such as")
        embedding = None
        for name, array in arrays:
            title = str(array.attrs.get("name", name))
            if title.endswith("embedding.word_embeddings.weight") and "exp_avg" not in title:
                embedding = array
            if "exp_avg" not in title:
                logical = array.attrs["logical_dtype"]
                print(f"  {title:<58} {array.shape!s:<16} {array.dtype} (logical {logical})")
        rows, digest = self.saved[commit["step"]]["rows"]
        if embedding is None:
            raise Failed("zarr-python finds no array of the word embeddings")
        if hashlib.sha256(np.asarray(embedding[:rows]).tobytes()).hexdigest() != digest:
            raise Failed("zarr-python reads other bytes of the word embeddings than the trainer had")
        print(f"  and reads the {rows} embedding rows of TP rank 0 as that rank held them, byte for byte")


def _size(event: Event) -> str:
    return f"{event['bytes'] / 2**20:.1f} MiB in {event['seconds']:.2f} s"


def tell_story(story: Story) -> None:
    print(f"{'step':>4}  {'layout':<9}  {'state id':<12}  {'loss':<8}  what happened", flush=True)
    story.run(Shape("TP2 x PP2", tp=2, pp=2), until=GIVE_UP, seed=1, kill=True)
    resumed = max(story.saved)
    story.run(Shape("DP2", dp=2), until=resumed + 2 * EVERY, seed=2)
    story.run(Shape("TP4", tp=4), until=resumed + 3 * EVERY, seed=3)
    story.open_with_zarr()
    print(
        "\nEach load gave the state id that was saved. The killed save was never visible. Steps computed "
        f"again on another layout had the same loss within {story.furthest:.0e}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Save on one layout, be killed in mid-save, resume on two others.")
    parser.add_argument("--local", action="store_true", help="a temporary directory instead of an S3 server")
    args = parser.parse_args()
    began = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-demo-")))
            url, options, env = str(folder / "run"), {}, {}
            if not args.local:
                server = stack.enter_context(S3Server())
                url, options, env = server.url("demo"), server.storage_options, server.env
            print(f"Checkpoints go to {url}" + ("" if args.local else f" on {server.endpoint}"), flush=True)
            tell_story(Story(url, options, env, folder))
            finale(url, options, folder)
            print(f"Done in {time.monotonic() - began:.0f} s.")
    except (Failed, NotTheSame) as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    return 0


def _worker_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo.py worker")
    parser.add_argument("--url", required=True)
    for name in ("tp", "pp", "dp", "until", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work(_worker_arguments(sys.argv[2:]))
    else:
        sys.exit(main())
