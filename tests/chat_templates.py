"""Chat templates of many kinds, each with the tokens that it needs and what ends its answers."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A template."""

    text: str | dict[str, str]  # or several by name
    ends: tuple[str, ...] = ("</s>",)  # its model stops there; the first in an answer ends it
    specials: tuple[str, ...] = ()  # other special tokens
    eos: str | None = None  # the tokenizer's; None: the first of `ends`
    bos: str = "<s>"
    takes_parts: bool = False  # content may come in parts
    needs_ends: bool = False  # they must be told, since the template does not show them
    refused: str = ""  # what is said when it is opened; "": it is not refused
    cannot_find: bool = False  # answers cannot be found in its texts


def each(turn: str, ask: str = "", *, first: str = "", last: str = "") -> str:
    """Writes a text for each message `m`, then asks or ends."""
    end = f"{{% if add_generation_prompt %}}{ask}{{% else %}}{last}{{% endif %}}"
    return f"{first}{{% for m in messages %}}{turn}{{% endfor %}}{end}"


def im(text: str | dict[str, str], **settings: Any) -> Kind:
    """A template of ChatML."""
    return Kind(text, ("<|im_end|>",), ("<|im_start|>",), **settings)


def by_role(**turns: str) -> str:
    """A text per role; `other` for the rest."""
    other = turns.pop("other", "")
    cases = [f"{{% elif m.role == '{role}' %}}{text}" for role, text in turns.items()]
    return "{% if not m %}" + "".join(cases) + "{% else %}" + other + "{% endif %}"


def by_turn(ask: str = "", *, first: str = "", last: str = "", **turns: str) -> str:
    """Writes each message as its role does, then asks or ends."""
    return each(by_role(**turns), ask, first=first, last=last)


GEMMA_ASK = "<turn>model\n"
GEMMA_TEXT = "{{ m.content | trim }}<end_of_turn>\n"


def gemma(before: str = "", **turns: str) -> Kind:
    """A template of Gemma; `turns` hold the texts of the other roles."""
    turn = by_role(assistant=GEMMA_ASK + GEMMA_TEXT, **turns)
    text = before + each(turn, GEMMA_ASK, first="{{ bos_token }}")
    return Kind(text, ("<end_of_turn>",), ("<turn>",), eos="<eos>", bos="<bos>")


REFUSE = "{{ raise_exception('roles must be system, user, assistant') }}"
IM_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
IM_ASK = "<|im_start|>assistant\n"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ (c.function or c) | tojson }}\n</tool_call>{% endfor %}"
)
IM_TOOLS = (
    "{% if tools %}<|im_start|>system\nYou may call:{% for t in tools %}\n{{ t | tojson }}"
    "{% endfor %}<|im_end|>\n{% endif %}"
)
IM_RESULT = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
IM_CALLING = by_role(
    tool=IM_RESULT,
    assistant=IM_ASK + "{{ m.content or '' }}" + CALLS + "<|im_end|>\n",
    other=IM_TURN,
)
THOUGHT = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
IM_THINKING = by_role(
    tool=IM_RESULT,
    assistant=IM_ASK + "{% if m.reasoning_content and CONDITION %}" + THOUGHT + "{% endif %}"
    "{{ m.content or '' }}" + CALLS + "<|im_end|>\n",
    other=IM_TURN,
)
LAST_ASKED = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
L3 = ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
L3_HEAD = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
L3_ASK = "<|start_header_id|>assistant<|end_header_id|>\n\n"
L3_CALL = (
    L3_ASK + "{% if m.tool_calls %}<|python_tag|>{{ m.tool_calls[0].function | tojson }}<|eom_id|>"
    "{% else %}{{ m.content }}<|eot_id|>{% endif %}"
)
L3_RESULT = "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
L3_TOOLS = (
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\nYou may call "
    "{% for t in tools %}{{ t | tojson(indent=2) }}{% endfor %}<|eot_id|>{% endif %}"
)
FOLDED = (  # the system message goes into the first question
    "{% set s = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}"
)
INST = by_role(
    user="[INST] {{ m.content }} [/INST]", assistant=" {{ m.content | trim }} {{ eos_token }}"
)
MISTRAL = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
MISTRAL += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
MISTRAL_TOOLS = by_role(
    user="{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]",
    assistant="{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{{ eos_token }}",
    tool="[TOOL_RESULTS]{{ {'content': m.content, 'id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]",
    system="[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]",
)
COHERE = ("<|START|>", "<|USER|>", "<|CHATBOT|>", "<|SYSTEM|>")
HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>")
HARMONY_TURN = by_role(
    assistant="{% if m.reasoning_content and loop.last %}<|start|>assistant<|channel|>analysis"
    "<|message|>{{ m.reasoning_content }}<|end|>{% endif %}<|start|>assistant<|channel|>final"
    "<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}",
    tool=REFUSE,
    other="<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>",
)
PIPES = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
PIPE_TURN = "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"


def phi(text: str) -> Kind:
    """A template of Phi-3."""
    return Kind(text, ("<|end|>",), PIPES, eos="<|endoftext|>")


PLAIN = by_role(
    user="User: {{ m.content }}\n\n",
    assistant="Assistant: {{ m.content }}{{ eos_token }}",
    system="{{ m.content }}\n\n",
)
PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if not loop.first %}\n{% endif %}{{ p.text }}{% endfor %}{% endif %}"
)

KINDS = {
    # ChatML
    "chatml": im(each(IM_TURN, IM_ASK)),
    "chatml, bos": im(each(IM_TURN, IM_ASK, first="{{ bos_token }}")),
    "chatml, no newline behind turns": im(each(IM_TURN.removesuffix("\n"), IM_ASK)),
    "chatml, no newline behind the last turn": im(
        each(IM_TURN.removesuffix("\n") + "{{ '' if loop.last else '\n' }}", "{{ '\n' }}" + IM_ASK)
    ),
    "chatml, trimmed": im(each(IM_TURN.replace("m.content", "m.content | trim"), IM_ASK)),
    "chatml, another eos": im(each(IM_TURN, IM_ASK), eos="<|endoftext|>"),
    "chatml, eos once": im(each(IM_TURN, IM_ASK, last="{{ eos_token }}"), eos="<|endoftext|>"),
    "chatml, default system message": im(
        each(
            "{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n"
            "{% endif %}" + IM_TURN,
            IM_ASK,
        )
    ),
    "chatml, marks of generation": im(
        by_turn(
            IM_ASK,
            assistant=IM_ASK + "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n",
            other=IM_TURN,
        )
    ),
    "chatml, never asks": im(each(IM_TURN)),
    "chatml, always asks": im(
        "{% for m in messages %}" + IM_TURN + "{% endfor %}"
        "{% if messages[-1].role != 'assistant' %}" + IM_ASK + "{% endif %}"
    ),
    "chatml, names": im(
        each(IM_TURN.replace("{{ m.role }}", "{{ m.role }}{{ ' ' ~ m.name if m.name }}"), IM_ASK)
    ),
    "chatml, parts": im(each(IM_TURN.replace("{{ m.content }}", PARTS), IM_ASK), takes_parts=True),
    "chatml, tools": im(each(IM_CALLING, IM_ASK, first=IM_TOOLS)),
    "chatml, tools in a template apart": im(
        {"default": each(IM_TURN, IM_ASK), "tool_use": each(IM_CALLING, IM_ASK, first=IM_TOOLS)}
    ),
    "chatml, keeps reasoning": im(
        each(IM_THINKING.replace("CONDITION", "true"), IM_ASK, first=IM_TOOLS)
    ),
    "chatml, forgets reasoning": im(
        LAST_ASKED
        + each(IM_THINKING.replace("CONDITION", "loop.index0 > ns.last"), IM_ASK, first=IM_TOOLS)
    ),
    "chatml, an empty thought": im(
        LAST_ASKED
        + by_turn(
            IM_ASK,
            assistant=IM_ASK + "{% if loop.index0 > ns.last %}<think>\n"
            "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}"
            "<|im_end|>\n",
            other=IM_TURN,
        )
    ),
    "chatml, a thought in the content": im(
        each(
            IM_TURN.replace(
                "{{ m.content }}",
                "{{ m.content if loop.last else m.content.split('</think>')[-1] | trim }}",
            ),
            IM_ASK,
        )
    ),
    "chatml, thinks in the prompt": im(
        each(IM_TURN, IM_ASK + "<think>\n"),
        refused="begins a finished answer otherwise than it asks for it",
    ),
    # Llama
    "llama-2": Kind(
        FOLDED
        + by_turn(
            user="{{ bos_token }}[INST] {{ '<<SYS>>\n' ~ s ~ '<</SYS>>\n\n' if s and "
            "loop.index0 < 2 }}{{ m.content | trim }} [/INST]",
            assistant=" {{ m.content | trim }} {{ eos_token }}",
        )
    ),
    "llama-2, strict": Kind(
        each(INST.replace("{% else %}", "{% else %}" + REFUSE), first="{{ bos_token }}")
    ),
    "llama-3": Kind(
        each(L3_HEAD + "{{ m.content | trim }}<|eot_id|>", L3_ASK, first="{{ bos_token }}"),
        ("<|eot_id|>",),
        L3,
        eos="<|end_of_text|>",
    ),
    "llama-3.1, tools": Kind(
        by_turn(
            L3_ASK,
            first=L3_TOOLS,
            assistant=L3_CALL,
            tool=L3_RESULT,
            other=L3_HEAD + "{{ m.content }}<|eot_id|>",
        ),
        ("<|eot_id|>", "<|eom_id|>"),
        L3,
        eos="<|end_of_text|>",
    ),
    "alpaca": Kind(
        by_turn(
            "### Response:\n",
            first="{{ bos_token }}",
            user="### Instruction:\n{{ m.content }}\n\n",
            assistant="### Response:\n{{ m.content }}{{ eos_token }}\n\n",
            system="{{ m.content }}\n\n",
        )
    ),
    "vicuna": Kind(
        by_turn(
            "ASSISTANT:",
            first="{{ bos_token }}{% if messages[0].role != 'system' %}A chat. {% endif %}",
            user="USER: {{ m.content }} ",
            assistant="ASSISTANT: {{ m.content }}{{ eos_token }}",
            system="{{ m.content }} ",
        )
    ),
    # Mistral
    "mistral": Kind(each(INST, first="{{ bos_token }}"), ("</s>",), MISTRAL),
    "mistral, no blanks": Kind(
        FOLDED
        + by_turn(
            first="{{ bos_token }}",
            user="[INST]{{ s if loop.last or loop.index0 == messages | length - 2 }}"
            "{{ m.content }}[/INST]",
            assistant="{{ m.content }}{{ eos_token }}",
        ),
        ("</s>",),
        MISTRAL,
    ),
    "mistral, tools": Kind(
        LAST_ASKED + each(MISTRAL_TOOLS, first="{{ bos_token }}"), ("</s>",), MISTRAL
    ),
    # Others
    "phi-3": phi(each(PIPE_TURN, "<|assistant|>\n", last="{{ eos_token }}")),
    "phi-3, marks with a bos": phi(each(PIPE_TURN, "<|assistant|>\n", first="{{ bos_token }}")),
    "phi-4": Kind(
        each(
            "<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>",
            "<|im_start|>assistant<|im_sep|>",
        ),
        ("<|im_end|>",),
        ("<|im_start|>", "<|im_sep|>"),
        eos="<|endoftext|>",
    ),
    "zephyr": Kind(each("<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n", "<|assistant|>\n")),
    "tulu": Kind(
        by_turn(
            "<|assistant|>\n",
            assistant="<|assistant|>\n{{ m.content }}{{ eos_token if loop.last else '</s>' }}"
            "{{ '' if loop.last else '\n' }}",
            other="<|{{ m.role }}|>\n{{ m.content }}\n",
        )
    ),
    "gemma": gemma(system=REFUSE, other="<turn>{{ m.role }}\n" + GEMMA_TEXT),
    "gemma, system in the question": gemma(
        FOLDED, system="", user="<turn>user\n{{ s if loop.index0 < 2 }}" + GEMMA_TEXT
    ),
    "deepseek": Kind(each(PLAIN, "Assistant:", first="{{ bos_token }}"), ("<eos>",)),
    "deepseek, forgets thoughts": Kind(
        by_turn(
            "<|Assistant|>",
            first="{{ bos_token }}",
            user="<|User|>{{ m.content }}",
            assistant="<|Assistant|>{{ m.content if loop.last else "
            "m.content.split('</think>')[-1] }}{{ eos_token }}",
            system="{{ m.content }}",
        ),
        ("<eos>",),
        ("<|User|>", "<|Assistant|>"),
    ),
    "command-r": Kind(
        by_turn(
            "<|START|><|CHATBOT|>",
            first="{{ bos_token }}",
            user="<|START|><|USER|>{{ m.content }}<|END_OF_TURN|>",
            assistant="<|START|><|CHATBOT|>{{ m.content }}<|END_OF_TURN|>",
            system="<|START|><|SYSTEM|>{{ m.content }}<|END_OF_TURN|>",
        ),
        ("<|END_OF_TURN|>",),
        COHERE,
    ),
    "granite": Kind(
        each(
            "<|role|>{{ m.role }}<|/role|>{{ m.content }}<|end_of_text|>\n",
            "<|role|>assistant<|/role|>",
        ),
        ("<|end_of_text|>",),
        ("<|role|>", "<|/role|>"),
    ),
    "harmony": Kind(
        each(HARMONY_TURN, "<|start|>assistant"), ("<|return|>",), HARMONY, needs_ends=True
    ),
    "exaone": Kind(
        by_turn(
            "[|assistant|]",
            user="[|user|]{{ m.content }}\n",
            assistant="[|assistant|]{{ m.content }}[|endofturn|]\n",
            system="[|system|]{{ m.content }}[|endofturn|]\n",
        ),
        ("[|endofturn|]",),
        ("[|user|]", "[|assistant|]", "[|system|]"),
    ),
    "internlm": Kind(
        by_turn(
            "<|Bot|>:",
            first="{{ bos_token }}",
            user="<|User|>:{{ m.content }}<eoh>\n",
            assistant="<|Bot|>:{{ m.content }}<eoa>\n",
        ),
        ("<eoa>",),
        ("<eoh>",),
        eos="</s>",
    ),
    "glm": Kind(
        each("<|{{ m.role }}|>\n{{ m.content }}", "<|assistant|>\n", first="[gMASK]<sop>"),
        (),
        (*PIPES, "[gMASK]", "<sop>"),
        eos="<|endoftext|>",
        cannot_find=True,
    ),
    "nemotron": Kind(
        each("<extra>{{ m.role }}\n{{ m.content }}\n", "<extra>assistant\n"),
        (),
        ("<extra>",),
        eos="</s>",
        cannot_find=True,
    ),
    "no end, headings": Kind(
        each("### {{ m.role }}\n{{ m.content }}\n", "### assistant\n"),
        (),
        eos="</s>",
        cannot_find=True,
    ),
    "an end in plain text": Kind(
        each("{{ m.role }}> {{ m.content }} //\n", "assistant>"), (), eos="</s>"
    ),
    "eos between turns": Kind(
        each("{{ m.role }}: {{ m.content }}{{ '' if loop.last else eos_token }}", "</s>assistant:"),
        cannot_find=True,
    ),
    "no roles": Kind(each("{{ m.content }}{{ eos_token }}"), cannot_find=True),
    "system message moved": Kind(
        FOLDED
        + by_turn(
            "<|assistant|>",
            user="<|user|>{{ s if loop.index0 >= messages | length - 2 }}{{ m.content }}",
            assistant="<|assistant|>{{ m.content }}{{ eos_token }}",
        ),
        ("</s>",),
        PIPES,
    ),
    "upper case": Kind(
        each("{{ m.role | upper }}: {{ m.content | upper }}{{ eos_token }}", "ASSISTANT: "),
        refused="want questions and answers written as they are",
    ),
    "one turn only": im(
        each("{% if messages | length > 2 %}" + REFUSE + "{% endif %}" + IM_TURN, IM_ASK)
    ),
}
