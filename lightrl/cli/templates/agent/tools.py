"""The tools: all public methods except `reset`, `get_reward`, and `close`.

Type hints and docstrings define the schemas. Each trajectory has its own instance, so tools can keep state in `self`.
"""


class Calculator:
    def reset(self, **row):
        """Called with the example's columns before the first turn. A returned string is appended to the prompt."""

    def add(self, a: int, b: int) -> str:
        """
        Adds two numbers.

        Args:
            a: first number
            b: second number
        """
        return str(a + b)

    def multiply(self, a: int, b: int) -> str:
        """
        Multiplies two numbers.

        Args:
            a: first number
            b: second number
        """
        return str(a * b)
