"""A conversation as one text, by one fixed template.

::

    <|system|>
    You are a helpful assistant.
    <|user|>
    Hello.
    <|assistant|>
                       <- the model goes on here

A message is ``<|role|>``, a new line, its content, a new line. So the text of a longer conversation starts with
the text of the shorter one, also with the model's answer in between: what was computed for a turn is a prefix
of the next. Contents are put in as they are: a content that has such a line in it reads like another message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kvstrata.proto.errors import InvalidArgument

ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def render_chat(messages: Iterable[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
    """The text of the messages (``role`` and ``content`` of each), and the head of the answer to come.

    Raises :class:`InvalidArgument` for a role that is not one of ``ROLES``, and for no messages at all.
    """
    parts = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise InvalidArgument(f"role {role!r}: choose one of {', '.join(ROLES)}")
        parts.append(f"<|{role}|>\n{content}\n")
    if not parts:
        raise InvalidArgument("the conversation has no messages: send at least one")
    return "".join(parts) + ("<|assistant|>\n" if add_generation_prompt else "")
