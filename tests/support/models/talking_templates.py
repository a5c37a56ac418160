"""Chat templates that take tools, their calls and results, and a switch of thinking, in the manner of today's models."""

from __future__ import annotations

_SYSTEM = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}
        {{- (tool | tojson) + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_ANSWER = """\
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
_TURNS = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- ARGUMENTS }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""
TALKS = _SYSTEM + _TURNS.replace("ARGUMENTS", "call.function.arguments | tojson") + _ANSWER
"""Messages, tools as JSON, calls with their arguments as JSON, results, and an empty thought where thinking is off."""
COUNTS = TALKS.replace(
    "{%- if enable_thinking is defined and enable_thinking is false %}", "{%- if enable_thinking is not defined %}"
)
"""The same, but that it writes something where nobody says whether to think."""
REPEATS = TALKS.replace("<tool_call>", "<tool_call><tool_call>")
"""The same, but for calls of tools."""
ITEMS = TALKS.replace(
    "{{- call.function.arguments | tojson }}",
    "{%- for name, value in call.function.arguments | items %}{{- name + '=' + value + ';' }}{%- endfor %}",
)
"""The same, but that arguments are written one by one, as GLM and Qwen3-Coder do."""
PRINTS = TALKS.replace("call.function.arguments | tojson", "call.function.arguments")
"""The same, but that arguments are written as Python writes them, with which llama.cpp's server does not begin."""
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
"""
"""Messages alone, as Ollama writes them too."""
SWITCHES = CHATML + "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{%- endif %}"
"""The same, with a switch of thinking."""
