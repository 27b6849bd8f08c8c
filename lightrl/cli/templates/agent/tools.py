"""The tools. Every public method but `reset`, `get_reward` and `close` is one: its schema is made of the type hints and
the docstring. Each attempt has an object of its own, so tools may keep what they need in `self`."""


class Calculator:
    def reset(self, **row):
        """Called with a row's columns before the first turn; a string that it returns is appended to the prompt."""

    def add(self, a: int, b: int) -> str:
        """
        Adds two numbers.

        Args:
            a: one number
            b: the other number
        """
        return str(a + b)

    def multiply(self, a: int, b: int) -> str:
        """
        Multiplies two numbers.

        Args:
            a: one number
            b: the other number
        """
        return str(a * b)
