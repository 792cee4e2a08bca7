"""Every kind of wrong spec gives one error: where, what, what is legal; no crash."""

import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mhcgen.errors import MAX_COLUMNS, MAX_LINES, SpecError
from mhcgen.spec_file import load_spec

LEGAL = """\
name: glm53
model:
  hidden: 4096
  hc: 4
  rms_eps: 1.0e-5
parallel:
  tp: 4
  transports: [multicast, unicast]
capacity:
  max_tokens: 256
moe: {top_k: 8, shared_expert: optional}
targets: {sm_90a: {cluster_size: 8}}
"""
TARGETS = "targets: {sm_90a: {cluster_size: 8}}"

# What errors say is legal, where several say the same.
NAME = "text like ^[a-z][a-z0-9_]{0,47}$"
FREE = (
    "any name but those of Python's keywords, modules that packages import, and devices"
)
HIDDEN = "a multiple of 8 from 64 to 16384"
EPS = "a number from 1.2e-38 to 0.01"
MODEL_KEYS = (
    "hidden, hc, rms_eps, hc_eps, norm_eps, post_mult, sinkhorn_iters, pre_mix or "
    "norm_weight"
)
MODEL = f"a mapping with keys of {MODEL_KEYS.replace(' or', ',')}"
ROOT_KEYS = (
    "name, model, parallel, capacity, moe, precision, batch_invariant, mixes, ends, "
    "outputs or targets"
)
TP = "1, 2, 4, 8 or 16"
TOKENS = "a whole number from 1 to 1024"
ROOT = f"a mapping with keys of {ROOT_KEYS.replace(' or', ',')}"


def groups(entries: str) -> str:
    """The targets line with these token groups."""
    return f"targets: {{sm_90a: {{token_groups: [{entries}]}}}}"


def wrong(kind: str, legal: str, instead: str, *lines: str):
    """The legal spec with one part replaced, and the lines of its error."""
    assert LEGAL.count(legal) == 1
    return wrong_file(kind, LEGAL.replace(legal, instead).encode(), *lines)


def wrong_file(kind: str, content: bytes, *lines: str):
    """A whole file, and the lines of its error, less the file's name and wrapping."""
    return pytest.param(content, lines, id=kind.replace(" ", "-"))


WRONG = [
    wrong(
        "missing name",
        "name: glm53\n",
        "",
        "1:1: name: missing",
        f"    allowed: {NAME}; add it",
    ),
    wrong(
        "missing model",
        "model:\n  hidden: 4096\n  hc: 4\n  rms_eps: 1.0e-5\n",
        "",
        "1:1: model: missing",
        f"    allowed: {MODEL}; add it",
    ),
    wrong(
        "missing hidden",
        "  hidden: 4096\n",
        "",
        "2:1: model.hidden: missing",
        f"    allowed: {HIDDEN}; add it",
    ),
    wrong(
        "missing tp",
        "  tp: 4\n",
        "",
        "6:1: parallel.tp: missing",
        f"    allowed: {TP}; add it",
    ),
    wrong(
        "missing max_tokens of a token group",
        TARGETS,
        groups("{group: 1}"),
        "12:35: targets.sm_90a.token_groups[0].max_tokens: missing",
        f"    allowed: {TOKENS}; add it",
    ),
    wrong(
        "missing group of a token group",
        TARGETS,
        groups("{max_tokens: 256}"),
        "12:35: targets.sm_90a.token_groups[0].group: missing",
        "    allowed: a whole number from 1 to 64; add it",
    ),
    wrong(
        "name without a value",
        "name: glm53",
        "name:",
        "1:1: name: without a value",
        f"    given nothing; allowed: {NAME}",
    ),
    wrong(
        "model without a value",
        "model:\n  hidden: 4096\n  hc: 4\n  rms_eps: 1.0e-5\n",
        "model:\n",
        "2:1: model: without a value",
        f"    given nothing; allowed: {MODEL}",
    ),
    wrong(
        "parallel null",
        "parallel:\n  tp: 4\n  transports: [multicast, unicast]",
        "parallel: null",
        "6:11: parallel: without a value",
        "    given null; allowed: a mapping with keys of tp, transports",
    ),
    wrong(
        "hc without a value",
        "hc: 4",
        "hc:",
        "4:3: model.hc: without a value",
        "    given nothing; allowed: 1, 2, 4 or 8; remove the key for its default",
    ),
    wrong(
        "hidden as a tilde",
        "4096",
        "~",
        "3:11: model.hidden: without a value",
        f"    given ~; allowed: {HIDDEN}",
    ),
    wrong(
        "transports null",
        "[multicast, unicast]",
        "null",
        "8:15: parallel.transports: without a value",
        "    given null; allowed: a list of multicast or unicast, each once; remove "
        "the key for its default",
    ),
    wrong(
        "misspelt section",
        "capacity:",
        "capasity:",
        "9:1: capasity: an unknown key",
        f"    given capasity; allowed: {ROOT_KEYS}; did you mean capacity?",
    ),
    wrong(
        "misspelt key",
        "hidden:",
        "hiden:",
        "2:1: model.hidden: missing",
        f"    allowed: {HIDDEN}; add it",
        "3:3: model.hiden: an unknown key",
        f"    given hiden; allowed: {MODEL_KEYS}; did you mean hidden?",
    ),
    wrong(
        "key in the wrong case",
        "top_k",
        "Top_K",
        "11:7: moe.Top_K: an unknown key",
        "    given Top_K; allowed: top_k, shared_expert or weight_dtypes; did you "
        "mean top_k?",
    ),
    wrong(
        "unknown key with no likeness",
        "  hc: 4",
        "  zzz: 4",
        "4:3: model.zzz: an unknown key",
        f"    given zzz; allowed: {MODEL_KEYS}",
    ),
    wrong(
        "unknown architecture",
        "sm_90a",
        "sm_90",
        "12:11: targets.sm_90: an unknown key",
        "    given sm_90; allowed: sm_90a, sm_100a, sm_103a or sm_120a; did you mean "
        "sm_90a?",
    ),
    wrong(
        "key in capitals",
        "  transports:",
        "  TRANSPORTS:",
        "8:3: parallel.TRANSPORTS: an unknown key",
        "    given TRANSPORTS; allowed: tp or transports; did you mean transports?",
    ),
    wrong(
        "choice in capitals",
        "shared_expert: optional",
        "shared_expert: NEVER",
        "11:32: moe.shared_expert: not one of the choices",
        "    given NEVER; allowed: optional, always or never; did you mean never?",
    ),
    wrong(
        "misspelt transport",
        "[multicast, unicast]",
        "[multicats, unicast]",
        "8:16: parallel.transports[0]: not one of the choices",
        "    given multicats; allowed: multicast or unicast; did you mean multicast?",
    ),
    wrong(
        "misspelt choice",
        "shared_expert: optional",
        "shared_expert: optonal",
        "11:32: moe.shared_expert: not one of the choices",
        "    given optonal; allowed: optional, always or never; did you mean optional?",
    ),
    wrong(
        "empty key",
        "  hc: 4",
        '  "": 4',
        '4:3: model."": an unknown key',
        f'    given ""; allowed: {MODEL_KEYS}',
    ),
    wrong(
        "hidden quoted",
        "4096",
        '"4096"',
        "3:11: model.hidden: not a whole number",
        f'    given "4096"; allowed: {HIDDEN}; remove the quotes',
    ),
    wrong(
        "hidden as a float",
        "4096",
        "4096.0",
        "3:11: model.hidden: not a whole number",
        f"    given 4096.0; allowed: {HIDDEN}; nearest: 4096",
    ),
    wrong(
        "hidden with a fraction",
        "4096",
        "4100.5",
        "3:11: model.hidden: not a whole number",
        f"    given 4100.5; allowed: {HIDDEN}; nearest: 4096, 4104",
    ),
    wrong(
        "hidden as true",
        "4096",
        "true",
        "3:11: model.hidden: not a whole number",
        f"    given true; allowed: {HIDDEN}",
    ),
    wrong(
        "hidden as a word",
        "4096",
        "large",
        "3:11: model.hidden: not a whole number",
        f"    given large; allowed: {HIDDEN}",
    ),
    wrong(
        "hidden as a list",
        "4096",
        "[4096]",
        "3:11: model.hidden: not a whole number",
        f"    given [4096]; allowed: {HIDDEN}",
    ),
    wrong(
        "hidden as a mapping",
        "4096",
        "{value: 4096}",
        "3:11: model.hidden: not a whole number",
        f"    given {{value: 4096}}; allowed: {HIDDEN}",
    ),
    wrong(
        "hidden in hexadecimal",
        "4096",
        "0x1000",
        "3:11: model.hidden: not a whole number",
        f"    given 0x1000; allowed: {HIDDEN}; in plain decimals: 4096",
    ),
    wrong(
        "hidden in octal",
        "4096",
        "0o10000",
        "3:11: model.hidden: not a whole number",
        f"    given 0o10000; allowed: {HIDDEN}; in plain decimals: 4096",
    ),
    wrong(
        "hidden with a leading zero",
        "4096",
        "04096",
        "3:11: model.hidden: not a whole number",
        f"    given 04096; allowed: {HIDDEN}; nearest: 4096",
    ),
    wrong(
        "hidden with an underscore",
        "4096",
        "4_096",
        "3:11: model.hidden: not a whole number",
        f"    given 4_096; allowed: {HIDDEN}; in plain decimals: 4096",
    ),
    wrong(
        "hidden in exponent form",
        "4096",
        "4e3",
        "3:11: model.hidden: not a whole number",
        f"    given 4e3; allowed: {HIDDEN}; nearest: 4000",
    ),
    wrong(
        "hidden as infinity",
        "4096",
        ".inf",
        "3:11: model.hidden: not a whole number",
        f"    given .inf; allowed: {HIDDEN}; nearest: 16384",
    ),
    wrong(
        "hidden as not a number",
        "4096",
        ".nan",
        "3:11: model.hidden: not a whole number",
        f"    given .nan; allowed: {HIDDEN}",
    ),
    wrong(
        "hc as true",
        "hc: 4",
        "hc: true",
        "4:7: model.hc: not a whole number",
        "    given true; allowed: 1, 2, 4 or 8",
    ),
    wrong(
        "hc as a float",
        "hc: 4",
        "hc: 4.0",
        "4:7: model.hc: not a whole number",
        "    given 4.0; allowed: 1, 2, 4 or 8; nearest: 4",
    ),
    wrong(
        "epsilon as true",
        "1.0e-5",
        "true",
        "5:12: model.rms_eps: not a number",
        f"    given true; allowed: {EPS}; such as 1e-06",
    ),
    wrong(
        "epsilon quoted",
        "1.0e-5",
        '"1.0e-5"',
        "5:12: model.rms_eps: not a number",
        f'    given "1.0e-5"; allowed: {EPS}; remove the quotes',
    ),
    wrong(
        "epsilon as a word",
        "1.0e-5",
        "small",
        "5:12: model.rms_eps: not a number",
        f"    given small; allowed: {EPS}",
    ),
    wrong(
        "name as a number",
        "name: glm53",
        "name: 53",
        "1:7: name: not text",
        f"    given 53; allowed: {NAME}",
    ),
    wrong(
        "name as true",
        "name: glm53",
        "name: true",
        "1:7: name: not text",
        f"    given true; allowed: {NAME}",
    ),
    wrong(
        "name as a list",
        "name: glm53",
        "name: [glm53]",
        "1:7: name: not text",
        f"    given [glm53]; allowed: {NAME}",
    ),
    wrong(
        "transports as text",
        "[multicast, unicast]",
        "unicast",
        "8:15: parallel.transports: not a list",
        "    given unicast; allowed: a list of multicast or unicast, each once",
    ),
    wrong(
        "transport as a number",
        "[multicast, unicast]",
        "[1]",
        "8:16: parallel.transports[0]: not one of the choices",
        "    given 1; allowed: multicast or unicast",
    ),
    wrong(
        "section as a list",
        "capacity:\n  max_tokens: 256",
        "capacity: [256]",
        "9:11: capacity: not a mapping",
        "    given [256]; allowed: a mapping with keys of max_tokens",
    ),
    wrong(
        "section as a number",
        "capacity:\n  max_tokens: 256",
        "capacity: 256",
        "9:11: capacity: not a mapping",
        "    given 256; allowed: a mapping with keys of max_tokens",
    ),
    wrong(
        "targets as a list",
        TARGETS,
        "targets: [sm_90a]",
        "12:10: targets: not a mapping",
        "    given [sm_90a]; allowed: a mapping with keys of sm_90a, sm_100a, sm_103a, "
        "sm_120a",
    ),
    wrong(
        "target as a number",
        TARGETS,
        "targets: {sm_90a: 8}",
        "12:19: targets.sm_90a: not a mapping",
        "    given 8; allowed: a mapping with keys of cluster_size, token_groups",
    ),
    wrong(
        "token group as a number",
        TARGETS,
        groups("256"),
        "12:35: targets.sm_90a.token_groups[0]: not a mapping",
        "    given 256; allowed: a mapping with keys of max_tokens, group, fn_octets, "
        "launches",
    ),
    wrong(
        "hidden not a multiple",
        "4096",
        "4097",
        "3:11: model.hidden: not a multiple of 8",
        f"    given 4097; allowed: {HIDDEN}; nearest: 4096, 4104",
    ),
    wrong(
        "hidden too small",
        "4096",
        "8",
        "3:11: model.hidden: too small",
        f"    given 8; allowed: {HIDDEN}; nearest: 64",
    ),
    wrong(
        "hidden negative",
        "4096",
        "-4096",
        "3:11: model.hidden: too small",
        f"    given -4096; allowed: {HIDDEN}; nearest: 64",
    ),
    wrong(
        "hidden too large",
        "4096",
        "16392",
        "3:11: model.hidden: too large",
        f"    given 16392; allowed: {HIDDEN}; nearest: 16384",
    ),
    wrong(
        "hidden of forty digits",
        "4096",
        "1" + "0" * 40,
        "3:11: model.hidden: too large",
        f"    given 1{'0' * 40}; allowed: {HIDDEN}; nearest: 16384",
    ),
    wrong(
        "hidden of five thousand digits",
        "4096",
        "9" * 5000,
        "3:11: model.hidden: too long a number",
        f"    given {'9' * 57}...; allowed: at most 64 characters; round it",
    ),
    wrong(
        "hc between the choices",
        "hc: 4",
        "hc: 3",
        "4:7: model.hc: not one of the choices",
        "    given 3; allowed: 1, 2, 4 or 8; nearest: 2, 4",
    ),
    wrong(
        "tp too large",
        "tp: 4",
        "tp: 32",
        "7:7: parallel.tp: not one of the choices",
        f"    given 32; allowed: {TP}; nearest: 16",
    ),
    wrong(
        "tp too small",
        "tp: 4",
        "tp: 0",
        "7:7: parallel.tp: not one of the choices",
        f"    given 0; allowed: {TP}; nearest: 1",
    ),
    wrong(
        "epsilon zero",
        "1.0e-5",
        "0",
        "5:12: model.rms_eps: too small",
        f"    given 0; allowed: {EPS}; such as 1e-06",
    ),
    wrong(
        "epsilon zero in FP32",
        "1.0e-5",
        "1e-60",
        "5:12: model.rms_eps: too small",
        f"    given 1e-60; allowed: {EPS}; such as 1e-06",
    ),
    wrong(
        "epsilon negative",
        "1.0e-5",
        "-1e-6",
        "5:12: model.rms_eps: too small",
        f"    given -1e-6; allowed: {EPS}; such as 1e-06",
    ),
    wrong(
        "epsilon too large",
        "1.0e-5",
        "0.1",
        "5:12: model.rms_eps: too large",
        f"    given 0.1; allowed: {EPS}; nearest: 0.01",
    ),
    wrong(
        "epsilon not a number",
        "1.0e-5",
        ".nan",
        "5:12: model.rms_eps: not a finite number",
        f"    given .nan; allowed: {EPS}; such as 1e-06",
    ),
    wrong(
        "epsilon infinite",
        "1.0e-5",
        ".inf",
        "5:12: model.rms_eps: not a finite number",
        f"    given .inf; allowed: {EPS}; nearest: 0.01",
    ),
    wrong(
        "epsilon too large for a float",
        "1.0e-5",
        "1e999",
        "5:12: model.rms_eps: not a finite number",
        f"    given 1e999; allowed: {EPS}; nearest: 0.01",
    ),
    wrong(
        "max_tokens zero",
        "max_tokens: 256",
        "max_tokens: 0",
        "10:15: capacity.max_tokens: too small",
        f"    given 0; allowed: {TOKENS}; nearest: 1",
    ),
    wrong(
        "max_tokens too large",
        "max_tokens: 256",
        "max_tokens: 1025",
        "10:15: capacity.max_tokens: too large",
        f"    given 1025; allowed: {TOKENS}; nearest: 1024",
    ),
    wrong(
        "top_k too large",
        "top_k: 8",
        "top_k: 33",
        "11:14: moe.top_k: too large",
        "    given 33; allowed: a whole number from 1 to 32; nearest: 32",
    ),
    wrong(
        "cluster_size too large",
        "cluster_size: 8",
        "cluster_size: 17",
        "12:34: targets.sm_90a.cluster_size: too large",
        "    given 17; allowed: a whole number from 1 to 16; nearest: 16",
    ),
    wrong(
        "group too large",
        TARGETS,
        groups("{max_tokens: 256, group: 65}"),
        "12:60: targets.sm_90a.token_groups[0].group: too large",
        "    given 65; allowed: a whole number from 1 to 64; nearest: 64",
    ),
    wrong(
        "unknown activation",
        TARGETS,
        "precision: {activation: f16}",
        "12:25: precision.activation: not one of the choices",
        "    given f16; allowed: bf16 or fp16; did you mean fp16?",
    ),
    wrong(
        "unknown type of fn",
        TARGETS,
        "precision: {fn_weight: fp16}",
        "12:24: precision.fn_weight: not one of the choices",
        "    given fp16; allowed: bf16 or fp32; did you mean bf16?",
    ),
    wrong(
        "unknown projection",
        TARGETS,
        "precision: {projection: tensor-cores}",
        "12:25: precision.projection: not one of the choices",
        "    given tensor-cores; allowed: auto, tensor_cores or fma; did you mean "
        "tensor_cores?",
    ),
    wrong(
        "unknown pre-mix",
        "hc: 4",
        "pre_mix: lazy",
        "4:12: model.pre_mix: not one of the choices",
        "    given lazy; allowed: fresh or delayed",
    ),
    wrong(
        "unknown exit",
        TARGETS,
        "ends: {exit: average}",
        "12:14: ends.exit: not one of the choices",
        "    given average; allowed: mean, sigmoid or pre_mix",
    ),
    wrong(
        "entry that is no truth value",
        TARGETS,
        "ends: {entry: 1}",
        "12:15: ends.entry: not true or false",
        "    given 1; allowed: true or false",
    ),
    wrong(
        "batch_invariant as text",
        TARGETS,
        "batch_invariant: 'true'",
        "12:18: batch_invariant: not true or false",
        "    given 'true'; allowed: true or false",
    ),
    wrong(
        "empty list",
        "[multicast, unicast]",
        "[]",
        "8:15: parallel.transports: empty",
        "    given []; allowed: a list of multicast or unicast, each once",
    ),
    wrong(
        "empty targets",
        TARGETS,
        "targets: {}",
        "12:10: targets: empty",
        "    given {}; allowed: a mapping with keys of sm_90a, sm_100a, sm_103a, "
        "sm_120a",
    ),
    wrong(
        "empty token groups",
        TARGETS,
        groups(""),
        "12:34: targets.sm_90a.token_groups: empty",
        "    given []; allowed: a list, each entry a mapping with keys of "
        "max_tokens, group, fn_octets, launches",
    ),
    wrong(
        "repeated transport",
        "[multicast, unicast]",
        "[unicast, unicast]",
        "8:25: parallel.transports[1]: given before",
        "    given unicast; remove it",
    ),
    wrong(
        "group above its max_tokens",
        TARGETS,
        groups("{max_tokens: 4, group: 8}, {max_tokens: 256, group: 8}"),
        "12:58: targets.sm_90a.token_groups[0].group: more than its max_tokens",
        "    given 8; allowed: a whole number from 1 to 4; nearest: 4",
    ),
    wrong(
        "launches that are no number of launches",
        TARGETS,
        groups("{max_tokens: 256, group: 8, launches: 3}"),
        "12:73: targets.sm_90a.token_groups[0].launches: not one of the choices",
        "    given 3; allowed: 1 or 2; nearest: 2",
    ),
    wrong(
        "launches as a truth",
        TARGETS,
        groups("{max_tokens: 256, group: 8, launches: true}"),
        "12:73: targets.sm_90a.token_groups[0].launches: not a whole number",
        "    given true; allowed: 1 or 2",
    ),
    wrong(
        "mixes in an unknown place",
        TARGETS,
        "mixes: head",
        "12:8: mixes: not one of the choices",
        "    given head; allowed: side_stream or tail",
    ),
    wrong(
        "mixes switched on",
        TARGETS,
        "mixes: true",
        "12:8: mixes: not one of the choices",
        "    given true; allowed: side_stream or tail",
    ),
    wrong(
        "token groups that fall",
        TARGETS,
        groups(
            "{max_tokens: 16, group: 1}, {max_tokens: 8, group: 2}, {max_tokens: "
            "256, group: 4}"
        ),
        "12:76: targets.sm_90a.token_groups[1].max_tokens: not more than that of "
        "the entry before",
        "    given 8; allowed: more than 16; sort the entries by max_tokens",
    ),
    wrong(
        "token groups that stand still",
        TARGETS,
        groups("{max_tokens: 256, group: 1}, {max_tokens: 256, group: 2}"),
        "12:77: targets.sm_90a.token_groups[1].max_tokens: not more than that of "
        "the entry before",
        "    given 256; allowed: more than 256; sort the entries by max_tokens",
    ),
    wrong(
        "token groups short of the capacity",
        TARGETS,
        groups("{max_tokens: 128, group: 2}"),
        "12:48: targets.sm_90a.token_groups[0].max_tokens: the last entry does not "
        "end at capacity.max_tokens",
        "    given 128; allowed: 256",
    ),
    wrong(
        "token groups past the capacity",
        LEGAL[LEGAL.index("max_tokens") :],
        "max_tokens: 64\nmoe:\n" + groups("{max_tokens: 128, group: 2}"),
        "12:48: targets.sm_90a.token_groups[0].max_tokens: the last entry does not "
        "end at capacity.max_tokens",
        "    given 128; allowed: 64",
    ),
    wrong(
        "name with path separators",
        "name: glm53",
        "name: ../../etc/glm53",
        "1:7: name: not of the right form",
        f"    given ../../etc/glm53; allowed: {NAME}; nearest: etc_glm53",
    ),
    wrong(
        "name with a slash",
        "name: glm53",
        "name: a/b",
        "1:7: name: not of the right form",
        f"    given a/b; allowed: {NAME}; nearest: a_b",
    ),
    wrong(
        "name with a dash",
        "name: glm53",
        "name: GLM-5.3",
        "1:7: name: not of the right form",
        f"    given GLM-5.3; allowed: {NAME}; nearest: glm_5_3",
    ),
    wrong(
        "name with a digit first",
        "name: glm53",
        "name: 5glm",
        "1:7: name: not of the right form",
        f"    given 5glm; allowed: {NAME}; nearest: glm",
    ),
    wrong(
        "name of nothing legal",
        "name: glm53",
        'name: "..."',
        "1:7: name: not of the right form",
        f'    given "..."; allowed: {NAME}',
    ),
    wrong(
        "name too long",
        "name: glm53",
        "name: " + "g" * 49,
        "1:7: name: not of the right form",
        f"    given {'g' * 49}; allowed: {NAME}; nearest: {'g' * 48}",
    ),
    wrong(
        "name with a line end",
        "name: glm53",
        'name: "glm53\\n"',
        "1:7: name: not of the right form",
        f'    given "glm53\\n"; allowed: {NAME}; nearest: glm53',
    ),
    wrong(
        "name with an escape sequence",
        "name: glm53",
        'name: "\\e[31mred"',
        "1:7: name: not of the right form",
        f'    given "\\e[31mred"; allowed: {NAME}; nearest: mred',
    ),
    wrong(
        "name in other letters",
        "name: glm53",
        "name: 模型",
        "1:7: name: not of the right form",
        f"    given \\u6a21\\u578b; allowed: {NAME}",
    ),
    wrong(
        "name of a keyword",
        "name: glm53",
        "name: lambda",
        "1:7: name: a reserved word",
        f"    given lambda; allowed: {FREE}; nearest: lambda_mhc",
    ),
    wrong(
        "name of a module",
        "name: glm53",
        "name: json",
        "1:7: name: a reserved word",
        f"    given json; allowed: {FREE}; nearest: json_mhc",
    ),
    *(
        wrong(
            f"YAML {version}",
            "name: glm53",
            f"%YAML {version}\n---\nname: glm53",
            "1:1: a directive for another version of YAML",
            f"    given %YAML {version}; allowed: YAML 1.2; remove the line",
        )
        for version in ("1.0", "1.3")
    ),
    wrong(
        "name of a device",
        "name: glm53",
        "name: nul",
        "1:7: name: a reserved word",
        f"    given nul; allowed: {FREE}; nearest: nul_mhc",
    ),
    wrong(
        "anchor",
        "4096",
        "&h 4096",
        "3:11: model.hidden: an anchor",
        "    given &h; write each value out",
    ),
    wrong(
        "anchor on a mapping",
        "model:",
        "model: &m",
        "2:8: model: an anchor",
        "    given &m; write each value out",
    ),
    wrong(
        "alias",
        "4096",
        "*h",
        "3:11: model.hidden: an alias",
        "    given *h; write the value out",
    ),
    wrong(
        "merge key",
        "  hc: 4",
        "  <<: {hc: 4}",
        '4:3: model."<<": a merge key',
        "    given <<; write the keys out",
    ),
    wrong(
        "merge key with an alias",
        "  hc: 4",
        "  <<: *defaults",
        '4:3: model."<<": a merge key',
        "    given <<; write the keys out",
        '4:7: model."<<": an alias',
        "    given *defaults; write the value out",
    ),
    wrong(
        "repeated key",
        "  hc: 4",
        "  hc: 4\n  hc: 8",
        "5:3: model.hc: a repeated key",
        "    given hc; remove one; the first is on line 4",
    ),
    wrong(
        "repeated section",
        "moe:",
        "capacity: {max_tokens: 8}\nmoe:",
        "11:1: capacity: a repeated key",
        "    given capacity; remove one; the first is on line 9",
    ),
    wrong(
        "python tag",
        "4096",
        "!!python/object/apply:os.system [id]",
        "3:11: model.hidden: a tag",
        "    given !!python/object/apply:os.system; write the plain value",
    ),
    wrong(
        "own tag",
        "4096",
        "!size 4096",
        "3:11: model.hidden: a tag",
        "    given !size; write the plain value",
    ),
    wrong(
        "standard tag",
        "4096",
        "!!int 4096",
        "3:11: model.hidden: a tag",
        "    given !!int; write the plain value",
    ),
    wrong(
        "key that is a number",
        "  hc: 4",
        "  4: 4",
        '4:3: model."4": a key that is not text',
        "    given 4; quote it, or remove it",
    ),
    wrong(
        "key that is true",
        "  hc: 4",
        "  true: 4",
        "4:3: model.true: a key that is not text",
        "    given true; quote it, or remove it",
    ),
    wrong(
        "key that is null",
        "  hc: 4",
        "  ~: 4",
        '4:3: model."~": a key that is not text',
        "    given ~; quote it, or remove it",
    ),
    wrong(
        "key that is a list",
        "  hc: 4",
        "  ? [a, b]\n  : 4",
        '4:5: model."?": a key that is not text',
        "    given [a, b]; quote it, or remove it",
    ),
    wrong(
        "half of a surrogate pair",
        "name: glm53",
        'name: "\\ud800"',
        "1:7: name: half of a character",
        '    given "\\ud800"; write the character itself',
    ),
    wrong(
        "character past Unicode",
        "name: glm53",
        'name: "\\UFFFFFFFF"',
        "1:1: not YAML: a character or version number too large",
    ),
    wrong(
        "tab as indentation",
        "  hc: 4",
        "\thc: 4",
        "4:1: not YAML: while scanning for the next token, found character '\\t' "
        "that cannot start any token",
        "    indent with spaces, not tabs",
    ),
    wrong(
        "open list",
        "[multicast, unicast]",
        "[multicast, unicast",
        "9:9: not YAML: while parsing a flow sequence, expected ',' or ']', but got "
        "':'",
        "    it starts on line 8",
    ),
    wrong(
        "open quote",
        "name: glm53",
        'name: "glm53',
        "13:1: not YAML: while scanning a quoted scalar, found unexpected end of "
        "stream",
        "    it starts on line 1",
    ),
    wrong(
        "two colons",
        "hc: 4",
        "hc: 4: 4",
        "4:8: not YAML: mapping values are not allowed here",
    ),
    wrong(
        "wrong indentation",
        "  hc: 4",
        "   hc: 4",
        "4:6: not YAML: mapping values are not allowed here",
    ),
    wrong(
        "at sign",
        "hc: 4",
        "hc: @4",
        "4:7: not YAML: while scanning for the next token, found character '@' that "
        "cannot start any token",
    ),
    wrong(
        "percent sign",
        "hc: 4",
        "hc: %4",
        "4:7: not YAML: while scanning for the next token, found character '%' that "
        "cannot start any token",
    ),
    wrong(
        "jinja braces",
        "4096",
        "{{ hidden }}",
        "3:11: model.hidden: not a whole number",
        f"    given {{{{ hidden }}}}; allowed: {HIDDEN}",
        '3:12: model.hidden."?": a key that is not text',
        "    given { hidden }; quote it, or remove it",
    ),
    wrong(
        "second document",
        "moe:",
        "---\nmoe:",
        "11:1: a second document",
        "    one spec per file",
    ),
    wrong(
        "deep list",
        "4096",
        "[" * 5000,
        "3:26: too many levels",
        "    allowed: at most 16",
    ),
    wrong(
        "deep mapping",
        "4096",
        "{a: " * 5000,
        "3:68: too many levels",
        "    allowed: at most 16",
    ),
    wrong(
        "deep keys",
        "4096",
        "? " * 5000,
        "3:11: not YAML: mapping keys are not allowed here",
    ),
    wrong(
        "other version of YAML",
        "name: glm53",
        "%YAML 1.1\n---\nname: glm53",
        "1:1: a directive for another version of YAML",
        "    given %YAML 1.1; allowed: YAML 1.2; remove the line",
    ),
    wrong_file("empty file", b"", "1:1: the file is empty"),
    wrong_file("blank lines", b" \n\n  \n", "1:1: the file is empty"),
    wrong_file(
        "only comments", b"# name: glm53\n# model:\n", "1:1: the file is only comments"
    ),
    wrong_file(
        "only a document start",
        b"---\n",
        "2:1: without a value",
        f"    given nothing; allowed: {ROOT}",
    ),
    wrong_file(
        "null", b"null\n", "1:1: without a value", f"    given null; allowed: {ROOT}"
    ),
    wrong_file(
        "list at the top",
        b"- name: glm53\n- model\n",
        "1:1: not a mapping",
        f"    given a list of 2; allowed: {ROOT}",
    ),
    wrong_file(
        "text at the top",
        b"glm53\n",
        "1:1: not a mapping",
        f"    given glm53; allowed: {ROOT}",
    ),
    wrong_file(
        "number at the top",
        b"4096\n",
        "1:1: not a mapping",
        f"    given 4096; allowed: {ROOT}",
    ),
    wrong_file(
        "binary",
        b"\x7fELF\x02\x01\x01\x00",
        "1:1: a control character",
        "    given \\x7f; remove it; is this the right file?",
    ),
    wrong_file(
        "object file",
        bytes(range(128, 256)),
        "1:1: not UTF-8 text",
        "    given the byte 0x80; save it as UTF-8; is this the right file?",
    ),
    wrong_file(
        "NUL byte",
        b"name: glm\x0053\n",
        "1:10: a control character",
        "    given \\x00; remove it; is this the right file?",
    ),
    wrong_file(
        "escape byte",
        b"name: \x1b[31mred\n",
        "1:7: a control character",
        "    given \\x1b; remove it; is this the right file?",
    ),
    wrong_file(
        "invalid UTF-8",
        b"# caf\xc3\xa9\nname: caf\xe9\n",
        "2:10: not UTF-8 text",
        "    given the byte 0xe9; save it as UTF-8; is this the right file?",
    ),
    wrong_file(
        "invalid UTF-8 after a byte order mark",
        b"\xef\xbb\xbfname: \xc3\xa9\xe9\n",
        "1:8: not UTF-8 text",
        "    given the byte 0xe9; save it as UTF-8; is this the right file?",
    ),
    wrong_file(
        "UTF-16",
        b"\xff\xfen\x00a\x00m\x00e\x00:\x00 \x00g\x00l\x00m\x005\x003\x00\n\x00",
        " UTF-16 or UTF-32 text",
        "    save it as UTF-8",
    ),
    wrong_file(
        "UTF-16 without a mark",
        b"n\x00a\x00m\x00e\x00:\x00 \x00g\x00l\x00m\x005\x003\x00\n\x00",
        "1:2: a control character",
        "    given \\x00; remove it; is this the right file?",
    ),
    wrong_file(
        "UTF-32",
        b"\x00\x00\xfe\xff\x00\x00\x00n\x00\x00\x00a\x00\x00\x00m\x00\x00\x00e",
        " UTF-16 or UTF-32 text",
        "    save it as UTF-8",
    ),
    wrong_file(
        "too large",
        b"#" * (256 * 1024 + 1),
        " too large for a spec",
        "    allowed: at most 256 KiB; is this the right file?",
    ),
    wrong_file(
        "too many values",
        b"a: [" + b"1," * 5000 + b"]",
        "1:8191: too many values",
        "    allowed: at most 4096",
    ),
    wrong_file(
        "alias bomb",
        b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n",
        "1:1: name: missing",
        f"    allowed: {NAME}; add it",
        "1:1: model: missing",
        f"    allowed: {MODEL}; add it",
        "1:1: parallel: missing",
        "    allowed: a mapping with keys of tp, transports; add it",
        "1:1: a: an unknown key",
        f"    given a; allowed: {ROOT_KEYS}",
        "1:4: a: an anchor",
        "    given &a; write each value out",
        "2:1: b: an unknown key",
        f"    given b; allowed: {ROOT_KEYS}",
        "2:4: b: an anchor",
        "    given &b; write each value out",
        "2:8: b[0]: an alias",
        "    given *a; write the value out",
        "2:12: b[1]: an alias",
        "    given *a; write the value out",
        "... and 7 more problems",
    ),
    wrong_file(
        "alias of itself",
        b"&a [*a]\n",
        "1:1: an anchor",
        "    given &a; write each value out",
        "1:1: not a mapping",
        f"    given &a [*a]; allowed: {ROOT}",
        "1:5: [0]: an alias",
        "    given *a; write the value out",
    ),
    wrong_file(
        "JSON",
        b'{"name": "glm53", "modle": {}}\n',
        "1:1: model: missing",
        f"    allowed: {MODEL}; add it",
        "1:1: parallel: missing",
        "    allowed: a mapping with keys of tp, transports; add it",
        "1:19: modle: an unknown key",
        f"    given modle; allowed: {ROOT_KEYS}; did you mean model?",
    ),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, so that errors name files shortly."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(path: str) -> str:
    """The text of the error that a spec gives; it fits one screen and is plain."""
    before = sorted(Path().rglob("*"))
    started = time.process_time()
    with pytest.raises(SpecError) as raised:
        load_spec(Path(path))
    assert time.process_time() - started < 5
    assert sorted(Path().rglob("*")) == before
    text = str(raised.value)
    assert len(text.splitlines()) <= MAX_LINES == 24
    assert all(len(line) <= MAX_COLUMNS == 100 for line in text.splitlines())
    assert re.fullmatch(r"[\x20-\x7e\n]+", text)
    return text


def unwrapped(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(("content", "lines"), WRONG)
def test_wrong_file(content: bytes, lines: tuple[str, ...]) -> None:
    Path("spec.yaml").write_bytes(content)
    place = re.compile("^(?=[0-9]+:[0-9]+: | (?! ))")
    expected = [place.sub("spec.yaml:", line) for line in lines]
    assert unwrapped(refusal("spec.yaml")) == unwrapped(" ".join(expected))


def test_the_text_that_is_made_wrong_is_legal() -> None:
    Path("spec.yaml").write_text(LEGAL)
    assert load_spec(Path("spec.yaml")).spec.name == "glm53"


def test_kinds_are_many_and_distinct() -> None:
    assert len({bytes(case.values[0]) for case in WRONG}) == len(WRONG) > 60


def make_pipe() -> None:
    os.mkfifo("spec.yaml")


def make_socket() -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("spec.yaml")


def make_folder() -> None:
    Path("spec.yaml").mkdir()


def make_folder_of_specs() -> None:
    Path("spec.yaml").mkdir()
    Path("spec.yaml/b.yaml").touch()
    Path("spec.yaml/a.yaml").touch()


def make_loop() -> None:
    Path("spec.yaml").symlink_to("spec.yaml")


def make_broken_link() -> None:
    Path("spec.yaml").symlink_to("elsewhere/gone.yaml")


def make_neighbours() -> None:
    for name in ("specs.yaml", "glm53.yaml", "README"):
        Path(name).touch()


def make_strangers() -> None:
    for name in ("glm53.yaml", "README"):
        Path(name).touch()


def make_nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("make", "path", "expected"),
    [
        (make_folder, "spec.yaml", "spec.yaml: a directory, not a file"),
        (
            make_folder_of_specs,
            "spec.yaml",
            "spec.yaml: a directory, not a file it holds a.yaml, b.yaml",
        ),
        (make_pipe, "spec.yaml", "spec.yaml: a pipe, not a file"),
        (make_socket, "spec.yaml", "spec.yaml: a socket, not a file"),
        (make_nothing, "/dev/zero", "/dev/zero: a device, not a file"),
        (make_nothing, "/dev/null", "/dev/null: a device, not a file"),
        (
            make_neighbours,
            "spec.yaml",
            "spec.yaml: no such file did you mean specs.yaml?",
        ),
        (
            make_strangers,
            "spec.yaml",
            "spec.yaml: no such file the current folder holds glm53.yaml",
        ),
        (
            make_nothing,
            "spec.yaml",
            "spec.yaml: no such file the current folder holds no *.yaml",
        ),
        (
            make_nothing,
            "specs/a.yaml",
            "specs/a.yaml: no such file there is no folder specs either",
        ),
        (
            make_broken_link,
            "spec.yaml",
            "spec.yaml: no such file did you mean spec.yaml?",
        ),
        (make_neighbours, "README/x", "README/x: cannot be read: Not a directory"),
        (
            make_loop,
            "spec.yaml",
            "spec.yaml: cannot be read: Too many levels of symbolic links",
        ),
        (
            make_nothing,
            "\x1b[31mred.yaml",
            "\\x1b[31mred.yaml: no such file the current folder holds no *.yaml",
        ),
        (
            make_nothing,
            "/proc/self/mem",
            "/proc/self/mem: cannot be read: Input/output error",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_no_file_to_read(make: Callable[[], None], path: str, expected: str) -> None:
    make()
    assert unwrapped(refusal(path)) == expected


def test_a_path_that_no_file_can_have() -> None:
    """The reason is Python's, whose words differ between its releases."""
    reason = r"a\\x00b: cannot be read: .*embedded null (byte|character).*"
    assert re.fullmatch(reason, unwrapped(refusal("a\0b")))


def test_a_file_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    Path("spec.yaml").write_text(LEGAL)
    monkeypatch.setattr(Path, "open", refuse)
    assert refusal("spec.yaml") == "spec.yaml: cannot be read: Permission denied"


def test_a_name_too_long_for_the_system() -> None:
    assert unwrapped(refusal("x" * 300)).endswith("cannot be read: File name too long")


def test_problems_that_do_not_depend_on_each_other_come_together() -> None:
    """The last one, about two sections, does not wait for the others to be mended."""
    text = (
        LEGAL.replace("hc: 4", "hc: 3\n  hc: 4")
        .replace("tp: 4", "tpp: &a 4")
        .replace("glm53", "json")
        .replace(TARGETS, groups("{max_tokens: 64, group: 1}"))
    )
    Path("spec.yaml").write_text(text)
    with pytest.raises(SpecError) as raised:
        load_spec(Path("spec.yaml"))
    assert [
        (position, problem.loc, problem.message)
        for position, problem in zip(
            raised.value.positions, raised.value.problems, strict=True
        )
    ] == [
        ((1, 7), ("name",), "a reserved word"),
        ((4, 7), ("model", "hc"), "not one of the choices"),
        ((5, 3), ("model", "hc"), "a repeated key"),
        ((7, 1), ("parallel", "tp"), "missing"),
        ((8, 3), ("parallel", "tpp"), "an unknown key"),
        ((8, 8), ("parallel", "tpp"), "an anchor"),
        (
            (13, 48),
            ("targets", "sm_90a", "token_groups", 0, "max_tokens"),
            "the last entry does not end at capacity.max_tokens",
        ),
    ]


def test_many_problems_are_cut_to_one_screen_and_counted() -> None:
    Path("spec.yaml").write_text(LEGAL + "".join(f"k{i}: 1\n" for i in range(1000)))
    lines = refusal("spec.yaml").splitlines()
    shown = sum("an unknown key" in line for line in lines)
    assert lines[-1] == f"... and {1000 - shown} more problems"
    assert shown >= 7


def test_a_file_of_the_largest_size_is_read() -> None:
    Path("spec.yaml").write_text(LEGAL.ljust(256 * 1024 - 1) + "\n")
    assert load_spec(Path("spec.yaml")).spec.name == "glm53"


@pytest.mark.parametrize(
    "text",
    [
        "{? " * 50_000,
        "? " * 100_000,
        "[" * 200_000,
        "- " * 100_000,
        "a: " + "1" * 250_000,
        "a: '" + "x" * 250_000,
        "a:\n" + " b c\n" * 40_000,
        "".join(f"k{i}: 1\n" for i in range(20_000)),
        "[" + "1," * 120_000,
        "&a " * 80_000,
        "!" * 250_000,
        "%YAML " + "1" * 5000 + ".1\n---\n",
        '"' + "\\U0010ffff" * 20_000,
        "# " * 120_000,
        ":" * 250_000,
        "\ufeff" * 80_000,
        "\x85" * 100_000,
        "<<: " * 50_000,
    ],
    ids=lambda text: repr(text[:8]),
)
def test_hostile_files_are_refused_soon(text: str) -> None:
    Path("spec.yaml").write_text(text)
    refusal("spec.yaml")
