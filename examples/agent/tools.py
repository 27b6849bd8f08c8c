"""The calculator: what `ToolEnvironment` makes of it are the tools `add` and `subtract`."""


class Calculator:
    """Adds and subtracts two numbers at a time. It keeps nothing between calls."""

    def reset(self, **row: object) -> None:
        """Begins a task; the question is the row's prompt as it is."""

    def add(self, a: int, b: int) -> str:
        """
        Adds two numbers.

        Args:
            a: one number
            b: the other number
        """
        return str(a + b)

    def subtract(self, a: int, b: int) -> str:
        """
        Subtracts a number from another.

        Args:
            a: from this
            b: this
        """
        return str(a - b)
