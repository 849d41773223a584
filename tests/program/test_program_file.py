"""The program file, and verification of what lies in a plan folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeplan.errors import PipeplanError, VerificationError
from pipeplan.plan.findings import RefusedError
from pipeplan.plan.folder import load_plan, write_plan_folder
from pipeplan.plan.types import QueueModel
from pipeplan.program.file import read_program, write_program
from pipeplan.program.folder import verify_loaded
from pipeplan.program.verify import verify_plan
from tests.program.examples import PAIR_PLAN, PAIR_PROFILE, V_PLAN, V_PROFILE, devices


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plan folder with its program."""
    write_plan_folder(PAIR_PLAN, PAIR_PROFILE, devices(2), tmp_path)
    write_program(verify_plan(PAIR_PLAN, PAIR_PROFILE, devices(2)), tmp_path / "program.yaml")
    return tmp_path


@pytest.mark.parametrize("queue_model", QueueModel)
def test_programs_survive_the_file(tmp_path: Path, queue_model: QueueModel) -> None:
    """What is written reads back as the same program, with the same digest."""
    verified = verify_plan(V_PLAN, V_PROFILE, devices(2), queue_model)
    write_program(verified, tmp_path / "program.yaml")
    again = read_program(tmp_path / "program.yaml")
    assert again == verified.program
    assert again.digest == verified.program.digest


def test_the_folders_own_program_is_what_is_verified(folder: Path) -> None:
    """A program edited by hand is refused although the plan is sound; without it the plan is lowered again."""
    loaded = load_plan(folder)
    assert verify_loaded(loaded).program == read_program(folder / "program.yaml")
    path = folder / "program.yaml"
    path.write_text(path.read_text().replace("S0>1 ", "").replace("!0>1 ", ""))
    with pytest.raises(RefusedError, match="S0>1: missing; rank 1 waits for this message"):
        verify_loaded(loaded)
    path.unlink()
    assert verify_loaded(loaded, QueueModel.SINGLE).queue_model is QueueModel.SINGLE


def test_a_program_of_another_plan_is_refused(folder: Path) -> None:
    """The digest ties the program to the plan beside it."""
    path = folder / "plan.yaml"
    path.write_text(path.read_text().replace("1F0 1B0 1F1 1B1", "1F0 1F1 1B0 1B1"))
    with pytest.raises(VerificationError, match="the program is of another plan: its plan digest is sha256:"):
        verify_loaded(load_plan(folder))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("S0>0", "S0-0"), "instructions of rank 0, position 2: '0-0' is not a message"),
        (("queue_model", "queue_modle"), "unknown key 'queue_modle' (did you mean 'queue_model'?)"),
        (("placement: [0, 1]", "placement: [0, 2]"), "stage 1 is placed on rank 2; the program has 2 ranks"),
        (("pipeplan-program/1", "pipeplan-program/9"), "which is newer"),
    ],
)
def test_faulty_files_say_what_is_wrong(folder: Path, change: tuple[str, str], text: str) -> None:
    """One sentence, with the place."""
    path = folder / "program.yaml"
    assert change[0] in path.read_text()
    path.write_text(path.read_text().replace(change[0], change[1], 1))
    with pytest.raises(PipeplanError) as caught:
        read_program(path)
    assert text in str(caught.value)
