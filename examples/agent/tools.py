"""A calculator. `ToolEnvironment` offers its methods as the tools `add` and `subtract`."""


class Calculator:
    """Adds and subtracts two numbers. It has no state."""

    def reset(self, **row: object) -> None:
        """Starts a task. The prompt remains unchanged."""

    def add(self, a: int, b: int) -> str:
        """
        Adds two numbers.

        Args:
            a: First number.
            b: Second number.
        """
        return str(a + b)

    def subtract(self, a: int, b: int) -> str:
        """
        Subtracts a number from another.

        Args:
            a: Number to subtract from.
            b: Number to subtract.
        """
        return str(a - b)
