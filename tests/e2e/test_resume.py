"""A run that was killed goes on as if nothing had happened: the same figures and weights, each sample once."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.ranks import RankError, run_ranks
from support.runs import (
    BLOW_AFTER,
    SAVE_EVERY,
    STEPS,
    VOCAB_SIZE,
    Blow,
    Drawn,
    Places,
    WholeRun,
    checkpoint_steps,
    curve,
    events,
    final_state,
    losses,
    other_bits,
    read_checkpoint,
    read_drawn,
    rows,
    run_config,
    run_inside,
)
from support.tiny import SEQUENCES

MESHES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "ep2-fsdp2": {"parallel__ep": 2},
    "hsdp-owning": {"parallel__dp_replicate": 2, "optim__replicas": "owning"},
    "ep4": {"parallel__ep": 4},
}
"""Of four ranks; Muon takes experts and matrices in all of them."""

ON_TWO_RANKS: dict[str, dict[str, Any]] = MESHES | {"ep4": {"parallel__ep": 2}}

KilledRun = Callable[[str], Path]


@pytest.fixture(scope="module")
def killed_run(places: Places, tmp_path_factory: pytest.TempPathFactory) -> KilledRun:
    """`killed_run(mesh)`: the folder of a run of four ranks of which one was killed; samples drawn lie beside it."""
    made: dict[str, Path] = {}

    def make(mesh: str) -> Path:
        if mesh not in made:
            run_dir = tmp_path_factory.mktemp("killed") / "run"
            # Rank 0 has written the row of the step by then; of another rank's death the row may be there or not.
            blow = Blow(signal.SIGKILL, rank=0 if mesh == "fsdp" else 3)
            config, log = run_config(places.corpus, **MESHES[mesh]), run_dir.with_name("drawn.log")
            with pytest.raises(RankError, match="the process died"):
                run_ranks(4, run_inside, config, run_dir, places.cache, blow, log)
            assert checkpoint_steps(run_dir) == [SAVE_EVERY]
            made[mesh] = run_dir
        return made[mesh]

    return make


def resume(killed: Path, folder: Path, places: Places, ranks: int, mesh: dict[str, Any]) -> Path:
    """Goes on with a copy of a killed run until its end; samples drawn go into `folder/drawn.RANK`."""
    run_dir = Path(shutil.copytree(killed, folder / "run"))
    config = run_config(places.corpus, **mesh)
    codes = run_ranks(ranks, run_inside, config, run_dir, places.cache, None, folder / "drawn.log")
    assert codes == [0] * ranks
    assert [event["step"] for event in events(run_dir, "resumed")] == [SAVE_EVERY]
    return run_dir


def drawn_in(folder: Path) -> list[Drawn]:
    return sorted((s for log in folder.glob("drawn.*") for s in read_drawn(log)), key=lambda s: (s.step, s.row))


@pytest.mark.parametrize("mesh", MESHES)
def test_four_ranks_resume_bit_for_bit(
    mesh: str, killed_run: KilledRun, whole_run: WholeRun, places: Places, tmp_path: Path
) -> None:
    run_dir, whole = resume(killed_run(mesh), tmp_path, places, 4, MESHES[mesh]), whole_run(4, **MESHES[mesh])
    assert curve(run_dir) == curve(whole)
    assert list(rows(run_dir, "train")) == list(range(1, STEPS + 1))
    assert list(rows(run_dir, "validation")) == [0, 4, 8]
    assert other_bits(final_state(run_dir), final_state(whole)) == []
    assert other_bits(final_state(run_dir), read_checkpoint(run_dir / "checkpoints" / "step_6")) != []


@pytest.mark.case(5)
def test_the_vocabulary_of_these_runs_is_uneven_over_their_ranks(whole_run: WholeRun) -> None:
    """So that every test here says that uneven shards resume bit for bit."""
    assert VOCAB_SIZE % 4
    assert VOCAB_SIZE % 2
    state = final_state(whole_run(4))
    assert state["model.embed.weight"].shape[0] == state["model.head.weight"].shape[0] == VOCAB_SIZE


@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize("mesh", MESHES)
def test_fewer_ranks_go_on_and_see_each_sample_once(
    mesh: str, ranks: int, killed_run: KilledRun, whole_run: WholeRun, places: Places, tmp_path: Path
) -> None:
    killed, whole = killed_run(mesh), whole_run(4, **MESHES[mesh])
    fewer = ON_TWO_RANKS[mesh] if ranks == 2 else {}
    run_dir = resume(killed, tmp_path, places, ranks, fewer)
    assert losses(run_dir) == pytest.approx(losses(whole), abs=1e-4)
    assert losses(run_dir)[:SAVE_EVERY] == losses(whole)[:SAVE_EVERY]

    first_life, second_life = drawn_in(killed.parent), drawn_in(tmp_path)
    assert max(sample.step for sample in first_life) >= BLOW_AFTER - 1
    seen = [sample for sample in first_life if sample.step < SAVE_EVERY] + second_life
    assert [(s.step, s.row) for s in seen] == [(step, row) for step in range(STEPS) for row in range(SEQUENCES)]
    assert len({sample.crc32 for sample in seen}) == STEPS * SEQUENCES, "no text twice"
    assert seen == drawn_in(whole.parent)
