"""What a job knows of its own commits, and which one its next follows."""

import pytest

import ckpt
from tests.engine.jobs import Job, check, commits_of
from tests.support.roots import Root


def test_a_commit_that_landed_though_its_save_raised_is_followed_by_the_next(root: Root) -> None:
    def lose(point: str) -> None:
        if point == "commit.done" and lost:
            raise ckpt.StoreError(lost.pop())

    lost: list[str] = []
    job = Job(root, faults=lose)
    job.save(1)
    lost.append("the answer was lost")
    with pytest.raises(ckpt.StoreError, match="the answer was lost"):
        job.save(2)
    job.save(3)
    assert check(root, job) == [1, 2, 3]  # one lineage


def test_a_job_that_goes_back_to_an_older_step_branches_from_it(root: Root) -> None:
    job = Job(root)
    for step in (1, 2, 3):
        job.save(step)
    assert job.load(1) == 1
    job.save(22)
    assert [(c["step"], c["parent"]) for c in commits_of(root)] == [(1, None), (2, 2), (3, 3), (22, 2)]
    reader = Job(root, read_only=True)
    assert reader.checkpointer.steps() == [1, 22] and reader.load() == 22
    with pytest.raises(ckpt.CkptError, match=r"no committed step 3; there are \[1, 22\]"):
        reader.load(3)


def test_a_closed_checkpointer_says_so(root: Root) -> None:
    job = Job(root)
    job.save(1)
    job.checkpointer.close()
    job.checkpointer.close()
    for act in (lambda: job.save(2), lambda: job.load()):
        with pytest.raises(ckpt.CkptError, match="closed"):
            act()
