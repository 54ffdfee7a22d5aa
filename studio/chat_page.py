"""The chat page: a run's model, and the one that it began with, answer the same questions side by side."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from studio.runs import find_runs
from studio.settings import StudioSettings
from studio.texts import escaped
from trinity_core.base.errors import TrinityError
from trinity_core.base.layout import label_of
from trinity_core.exchange.checkpoints.resume import whole_steps
from trinity_core.exchange.tracking.rollouts import read_rollouts, rollout_files
from trinity_core.results.chat import ChatModel, Conversation, chat_models, last_trained


def chat_page(settings: StudioSettings) -> None:
    folders = {run.name: run.folder for run in find_runs(settings.checkpoints) if run.folder is not None}
    trained = {name: last_trained(folder) for name, folder in folders.items()}
    steps = {name: whole_steps(folder)[::-1] for name, folder in trained.items()}
    names = [name for name, saved in steps.items() if saved]
    if not names:
        st.info("There is no checkpoint to talk to yet.")
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        name = str(st.selectbox("Run", names, key="run", bind="query-params"))
        step = int(st.selectbox("Checkpoint", steps[name]))
        greedy = st.toggle("Greedy", help="The likeliest answer. Off: one sampled as in training, which varies")
        again = st.button("New conversation")
    folder = folders[name]
    try:
        models = loaded(folder, step)
    except (OSError, TrinityError) as error:
        st.error(str(error))
        return
    shown, conversation = st.session_state.get("chat", (None, None))
    if conversation is None or again or shown != (folder, step, greedy):
        conversation = Conversation(models, greedy)
        st.session_state["chat"] = ((folder, step, greedy), conversation)
    text = st.chat_input("A question to both models")
    asked = [{"role": "user", "content": text}] if text else []
    above = st.empty()  # the rest stays in its place without it
    if not (conversation.turns or text) and (example := sampled_prompt(trained[name])):
        above.caption(f"The run was asked, for example: {escaped(example)}")
    for column, (model, chat_model) in zip(st.columns(len(models)), models.items(), strict=True):
        with column, st.container(border=True):
            st.caption(f"**{model}** {escaped(label_of(chat_model.path))}", help=escaped(chat_model.path))
            for turn in [*conversation.turns.get(model, ()), *asked]:
                st.chat_message(turn["role"]).text(turn["content"])
    below = st.empty()
    st.caption(f"To serve {[*models][-1]} with vLLM:")
    st.code([*models.values()][-1].serve_command(name.rpartition("/")[2]), "sh", wrap_lines=True)
    if text:
        try:
            with below, st.spinner("Answering …"):
                conversation.ask(text)
            st.rerun()
        except (OSError, TrinityError) as error:
            below.error(str(error))


def sampled_prompt(folder: Path) -> str:
    """Return a prompt that a run was asked; "" if it has sampled none."""
    for _, _, file in rollout_files(folder)[:1]:
        return read_rollouts(file)[0].prompt
    return ""


@st.cache_resource(max_entries=1, show_spinner="Loading the models …")
def loaded(folder: Path, step: int) -> dict[str, ChatModel]:
    """Return the models of one checkpoint; those before them leave the memory."""
    return chat_models(folder, step)
