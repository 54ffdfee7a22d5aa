"""The programs of docs/agents.md for other frameworks, as printed there, in environments that `make campaign` makes.
Each program then makes its framework force structured answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from inference.openai_server import serving
from inference.test_openai_api_scripted import ASK, TOOLS_TEMPLATE, folder, say, speaker  # noqa: F401

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ROOT / "docs" / "agents.md"
PARSING = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1", "enable_auto_tool_choice": True}
MODEL_CLASS = "\nfrom pydantic import BaseModel\n\nclass Answer(BaseModel):\n    value: int\n\n"


def calls(name: str, **arguments: object) -> str:
    """The policy thinks, then calls a tool."""
    return f"Well.</think><tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADDS, SAYS, VALUE = calls("add", x=2, y=3), "So it is.</think>It is 5.", 'So it is.</think>{"value": 5}'
DSPY = "So it is.</think>[[ ## answer ## ]]\nIt is 5.\n\n[[ ## completed ## ]]"
MORE: dict[str, tuple[str, list[str], list[int], int]] = {
    # what the program does after the recipe, what the policy says, answers with a loss in each sequence, those guided
    "openai-agents": (
        f"{MODEL_CLASS}agent = Agent('solver', model=MODEL, output_type=Answer)\n"
        "assert Runner.run_sync(agent, question).final_output.value == 5\n",
        [ADDS, SAYS, VALUE], [2, 0], 1,
    ),
    "pydantic-ai": (
        f"{MODEL_CLASS}from pydantic_ai import NativeOutput\nfor kind in (Answer, NativeOutput(Answer)):\n"
        "    assert Agent(f'openai:{MODEL}', output_type=kind).run_sync(question).output.value == 5\n",
        [ADDS, SAYS, calls("final_result", value=5), VALUE], [2, 0, 0], 2,
    ),
    "langgraph": (
        f"{MODEL_CLASS}assert ChatOpenAI(model=MODEL).with_structured_output(Answer).invoke(question).value == 5\n"
        "agent = create_agent(ChatOpenAI(model=MODEL), [add], response_format=Answer)\n"
        "assert agent.invoke({'messages': [('user', question)]})['structured_response'].value == 5\n",
        [ADDS, SAYS, VALUE, calls("Answer", value=5)], [2, 0, 0], 2,
    ),
    "litellm": (
        f"{MODEL_CLASS}reply = completion(f'openai/{{MODEL}}', messages=task['messages'], response_format=Answer)\n"
        "assert Answer.model_validate_json(reply.choices[0].message.content).value == 5\n",
        [SAYS, VALUE], [1, 0], 1,
    ),
    "dspy": (
        "dspy.configure(adapter=dspy.JSONAdapter())\n"
        "assert dspy.Predict('question -> value: int')(question=question).value == 5\n",
        [DSPY, VALUE], [1, 0], 1,
    ),
    "smolagents": ("", [ADDS, calls("final_answer", answer="It is 5.")], [0], 2),
    "AgentScope 1": (
        f"{MODEL_CLASS}model = OpenAIChatModel(MODEL, os.environ['OPENAI_API_KEY'], False, client_kwargs=client)\n"
        "agent = ReActAgent('solver', 'Add.', model, OpenAIChatFormatter(), toolkit)\n"
        "reply = asyncio.run(agent(Msg('user', question, 'user'), structured_model=Answer))\n"
        "assert reply.metadata == {'value': 5}\n",
        [ADDS, SAYS, calls("generate_response", value=5), SAYS], [2, 1], 1,
    ),
    "AgentScope 2": (
        f"{MODEL_CLASS}from agentscope.agent import ReActConfig\n"
        "once = ReActConfig(max_iters=1)\n"
        "agent = Agent('solver', 'Add.', OpenAIChatModel(credential, MODEL), tools, react_config=once)\n"
        "reply = asyncio.run(agent.reply(UserMsg('user', question), structured_schema=Answer))\n"
        "assert reply.structured_output == {'value': 5}\n",
        [ADDS, SAYS, SAYS, calls("GenerateStructuredOutput", value=5)], [2, 1], 1,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def api(speaker, folder):  # noqa: F811
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 8192}))
    with serving(folder, speaker, max_model_len=8192, chat_template=TOOLS_TEMPLATE, **PARSING) as served:
        yield served


def recipes() -> dict[str, str]:
    """The programs of the page, by framework, each with the common beginning and end."""
    section = FRAMEWORKS.read_text().partition("\n## Frameworks\n")[2].partition("\n## ")[0]
    begin, end, *rest = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = re.findall(r"^\*\*(.*?)\*\*", section, re.MULTILINE)
    return {name: f"{begin}{program}\n{{}}\n{end}" for name, program in zip(names, rest, strict=True)}


def test_every_framework_has_a_recipe():
    assert recipes().keys() == MORE.keys()


@pytest.mark.parametrize("name", MORE)
def test_framework_runs_unmodified(api, speaker, tmp_path, name):  # noqa: F811
    python = Path(f"{sys.prefix}-{'agentscope' if name == 'AgentScope 1' else 'frameworks'}/bin/python")
    if not python.exists():
        pytest.skip(f"{python.parents[1]} is missing; make campaign makes it")
    more, texts, answers, guided = MORE[name]
    say(speaker, *texts)
    session = api.session()
    program = recipes()[name].replace("\n{}\n", more)
    (tmp_path / "agent.py").write_text(program)
    (tmp_path / "task.json").write_text(json.dumps({"messages": ASK}))
    environment = {
        "HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "LITELLM_LOCAL_MODEL_COST_MAP": "true",
        "OPENAI_BASE_URL": api.server.base_url(session), "OPENAI_API_KEY": api.server.key, "OPENAI_MODEL": "policy",
        "TRINITY_TASK": str(tmp_path / "task.json"), "TRINITY_REPORT": str(tmp_path / "report.json"),
    }  # fmt: skip
    command = [python, tmp_path / "agent.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "report.json").read_text()) == {"answer": "It is 5."} and speaker.texts == []
    assert [len(sequence.answers) for sequence in session.sequences()] == answers
    assert session.guided[0] == guided
