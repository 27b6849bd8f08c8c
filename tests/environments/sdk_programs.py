"""Agents as their SDKs' own documentation writes them: two tools over three turns, and what SDKs ask beyond that."""

from __future__ import annotations

from typing import Any

from tests.environments import programs

QUESTION = "What is (1 + 2) * 4?"


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one
        b: two
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: one
        b: two
    """
    return a * b


_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
FUNCTIONS = [{"name": name, "description": name, "parameters": _SCHEMA} for name in ("add", "multiply")]


def openai_chat(row: Any, base_url: str, api_key: str) -> Any:
    return programs.chat(row, base_url, api_key, QUESTION, FUNCTIONS, "12")


async def openai_responses(row: Any, base_url: str, api_key: str) -> Any:
    tools = [{**function, "strict": False} for function in FUNCTIONS]
    return await programs.responses({**row, "items": True}, base_url, api_key, QUESTION, tools, "12")


async def _agents(row: Any, base_url: str, api_key: str, kind: str, output: Any = None) -> Any:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    model = getattr(agents, kind)(model="m", openai_client=client)
    tools: Any = [agents.function_tool(add), agents.function_tool(multiply)]
    agent = agents.Agent(name="calculator", instructions="Calculate.", tools=tools, model=model, output_type=output)
    if not row["stream"]:
        return (await agents.Runner.run(agent, QUESTION)).final_output
    result = agents.Runner.run_streamed(agent, QUESTION)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def agents_responses(row: Any, base_url: str, api_key: str) -> float:
    return float(await _agents(row, base_url, api_key, "OpenAIResponsesModel") == "12")


async def agents_chat(row: Any, base_url: str, api_key: str) -> float:
    return float(await _agents(row, base_url, api_key, "OpenAIChatCompletionsModel") == "12")


def answer_type() -> Any:
    from pydantic import BaseModel

    class Answer(BaseModel):
        value: int

    return Answer


async def agents_output(row: Any, base_url: str, api_key: str) -> float:
    result = await _agents(row, base_url, api_key, "OpenAIResponsesModel", answer_type())
    return float(result.value == 12)


def _chat_model(base_url: str, api_key: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="m", base_url=base_url, api_key=api_key)  # type: ignore[arg-type]


def langgraph(row: Any, base_url: str, api_key: str) -> float:
    from langchain_core.tools import tool
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(_chat_model(base_url, api_key), [tool(add), tool(multiply)])
    asked: Any = {"messages": [("user", QUESTION)]}
    if not row["stream"]:
        return float(agent.invoke(asked)["messages"][-1].content == "12")
    pieces = [part for part, _ in agent.stream(asked, stream_mode="messages") if part.type == "AIMessageChunk"]
    return float("".join(part.content for part in pieces) == "12")


def langchain_schema(row: Any, base_url: str, api_key: str) -> float:
    model = _chat_model(base_url, api_key).with_structured_output(answer_type())
    return float(model.invoke(QUESTION).value == 12)


def langchain_function(row: Any, base_url: str, api_key: str) -> float:
    model = _chat_model(base_url, api_key).with_structured_output(answer_type(), method="function_calling")
    return float(model.invoke(QUESTION).value == 12)


async def _pydantic(row: Any, base_url: str, api_key: str, output: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    agent = Agent(model, tools=[add, multiply], output_type=output)
    if not row["stream"]:
        return (await agent.run(QUESTION)).output
    async with agent.run_stream(QUESTION) as result:
        return await result.get_output()


async def pydantic_plain(row: Any, base_url: str, api_key: str) -> float:
    return float(await _pydantic(row, base_url, api_key, str) == "12")


async def pydantic_output(row: Any, base_url: str, api_key: str) -> float:
    return float((await _pydantic(row, base_url, api_key, answer_type())).value == 12)


async def pydantic_native(row: Any, base_url: str, api_key: str) -> float:
    from pydantic_ai import NativeOutput

    return float((await _pydantic(row, base_url, api_key, NativeOutput(answer_type()))).value == 12)


def _smolagents(row: Any, base_url: str, api_key: str, kind: str) -> Any:
    import smolagents

    model = smolagents.OpenAIModel(model_id="m", api_base=base_url, api_key=api_key)
    tools = [smolagents.tool(add), smolagents.tool(multiply)]
    agent = getattr(smolagents, kind)(tools=tools, model=model, max_steps=4, verbosity_level=0)
    agent.stream_outputs = row["stream"]
    return agent.run(QUESTION)


def smolagents_tools(row: Any, base_url: str, api_key: str) -> float:
    return float(int(_smolagents(row, base_url, api_key, "ToolCallingAgent")) == 12)


def smolagents_code(row: Any, base_url: str, api_key: str) -> float:
    return float(_smolagents(row, base_url, api_key, "CodeAgent") == 12)


def anthropic_runner(row: Any, base_url: str, api_key: str) -> float:
    import anthropic
    from anthropic import beta_tool

    def texts(function: Any) -> Any:
        return beta_tool(name=function.__name__, description="a tool", input_schema=_SCHEMA)(
            lambda a, b: str(function(a, b))
        )

    client = anthropic.Anthropic(base_url=base_url, api_key=api_key)
    asked: Any = [{"role": "user", "content": QUESTION}]
    runner: Any = client.beta.messages.tool_runner(
        model="m", max_tokens=300, tools=[texts(add), texts(multiply)], messages=asked, stream=row["stream"]
    )
    return float(runner.until_done().content[0].text == "12")


def anthropic_forced(row: Any, base_url: str, api_key: str) -> float:
    import anthropic

    client = anthropic.Anthropic(base_url=base_url, api_key=api_key)
    tools: Any = [{"name": "multiply", "description": "multiply", "input_schema": _SCHEMA}]
    message: Any = client.messages.create(
        model="m",
        max_tokens=300,
        messages=[{"role": "user", "content": QUESTION}],
        tools=tools,
        tool_choice={"type": "tool", "name": "multiply"},
    )
    return float(multiply(**message.content[0].input) == 12)
