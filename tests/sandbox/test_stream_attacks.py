"""Programs that attack the streams of their input and output: none has an effect."""

from pathlib import Path

import pytest

from gdpo_tune.sandbox import CodeSandbox, Job, Limits, Stream

pytestmark = pytest.mark.integration

LIMITS = Limits(cpu_seconds=0.5, wall_seconds=1.0, output_bytes=1 << 16)
# An attack that should not end by a clock gets clocks that a slow or busy machine does not reach.
PATIENT = Limits(cpu_seconds=10.0, wall_seconds=60.0, output_bytes=LIMITS.output_bytes)

# No attack knows the text after the square.
SECRETS = (Stream("3\n", "9 x4c1\n"), Stream("4\n", "16 x9ae\n"), Stream("5\n", "25 x77b\n"))
TEXT = Path(__file__).with_name("programs").joinpath("stream_attacks.txt").read_text()
# Heading (a name and the expected statuses) -> code.
ATTACKS = {part.partition("\n")[0]: part.partition("\n")[2] for part in TEXT.split("## ")[1:]}


@pytest.fixture(scope="module")
def attacked():
    """Every attack's result, with that of an honest job after it."""
    honest = Job("print(int(input()) ** 2)", streams=(Stream("3", "9"),), limits=PATIENT)
    jobs = [
        Job(code, streams=SECRETS, limits=LIMITS if "timeout" in heading else PATIENT)
        for heading, code in ATTACKS.items()
    ]
    with CodeSandbox() as sandbox:
        results = sandbox.run_batch([job for attack in jobs for job in (attack, honest)])
    return dict(zip(ATTACKS, zip(results[::2], results[1::2], strict=True), strict=True))


def test_there_are_enough_attacks():
    assert len(ATTACKS) >= 35


@pytest.mark.parametrize("heading", ATTACKS)
def test_an_attack_passes_no_test(attacked, heading):
    attack, honest = attacked[heading]
    statuses = heading.partition(": ")[2].split()
    assert attack.status in statuses, attack
    assert "passed" not in attack.verdicts
    assert honest.passed, honest
