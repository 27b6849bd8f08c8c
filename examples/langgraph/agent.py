"""A LangGraph agent that drafts the answer to a question, then states the number. It doesn't depend on LightRL.

Run it against any model server:

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/langgraph/agent.py "Calculate 47 + 8."
"""

import asyncio
import os
import re
import sys

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph


def build(base_url, api_key):
    """Returns the graph: draft -> ask -> answer."""
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, max_tokens=16, stop_sequences=["\n"])

    async def reply(state: MessagesState):
        return {"messages": [await model.ainvoke(state["messages"])]}

    def ask(state: MessagesState):
        return {"messages": [HumanMessage("State only the number.")]}

    graph = StateGraph(MessagesState)
    graph.add_node("draft", reply)
    graph.add_node("ask", ask)
    graph.add_node("answer", reply)
    for start, end in [(START, "draft"), ("draft", "ask"), ("ask", "answer"), ("answer", END)]:
        graph.add_edge(start, end)
    return graph.compile()


async def solve(question, base_url, api_key):
    """Returns the last number of the agent's answer, or None."""
    state = await build(base_url, api_key).ainvoke({"messages": [HumanMessage(question)]})
    numbers = re.findall(r"-?\d+", state["messages"][-1].content)
    return numbers[-1] if numbers else None


async def main(row, base_url, api_key):
    """Plays one trajectory and returns its reward: 1 if the answer is correct, else 0."""
    return float(await solve(row["prompt"], base_url, api_key) == row["answer"])


if __name__ == "__main__":
    print(asyncio.run(solve(sys.argv[1], os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])))
