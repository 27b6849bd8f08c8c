"""Run with `pytest`: the agent's own code, and whole attempts with scripted replies, without a model."""

from agent import calculate

from lightrl.cli import main


def test_the_calculator_answers_calls_and_explains_mistakes():
    assert calculate('{"operation": "multiply", "first": 6, "second": "7"}') == "42"
    assert calculate('{"operation": "divide"}').startswith("Error")


def test_the_agent_plays_attempts():
    main(["check-env", "config.yaml", "--rows", "1"])  # exits with 1 if something is wrong
