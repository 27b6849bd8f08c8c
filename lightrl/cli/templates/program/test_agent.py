"""Tests of the agent with scripted replies, without a model. Run them with `pytest`."""

from agent import calculate

from lightrl.cli import main


def test_calculate_returns_results_and_errors():
    assert calculate('{"operation": "multiply", "first": 6, "second": "7"}') == "42"
    assert calculate('{"operation": "divide"}').startswith("Error")


def test_agent_completes_trajectories():
    main(["check-env", "config.yaml", "--rows", "1"])  # exits with code 1 if it finds a problem
