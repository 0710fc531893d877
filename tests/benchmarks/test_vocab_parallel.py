"""The benchmark of heads on ranks at tiny shapes, in two processes on a CPU."""

from processes import run_on


def test_both_ways_are_right_and_measured():
    printed, _ = run_on(2, "../../benchmarks/vocab_parallel.py", "--smoke", "--losses", "ce", "jsd")
    rows = [line for line in printed.splitlines() if line.startswith(("| ce", "| jsd"))]
    assert [row.split(" | ")[1] for row in rows] == ["gathered", "parallel"] * 2
    assert not any("wrong" in row for row in rows)
