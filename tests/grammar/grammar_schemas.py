"""Schemas that are kept to, at least one for each supported keyword, and some that are refused by a keyword's name."""

from __future__ import annotations

from typing import Any

INT = {"type": "integer"}
STR = {"type": "string"}
OBJECT = {"type": "object"}

SUPPORTED: dict[str, Any] = {
    "any": {},
    "types": {"type": ["null", "boolean", "integer"]},
    "enum": {"enum": ["a", 1, None, [1, {"x": 2}], 'q"\\\u00e9\n']},
    "const": {"const": {"a": [1, "two", None]}},
    "string": STR,
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-f0-9]{3,5}(-x)?$"},
    "pattern anywhere": {"type": "string", "pattern": "b+c", "maxLength": 12},
    "format date": {"type": "string", "format": "date"},
    "format date-time": {"type": "string", "format": "date-time"},
    "format ipv4": {"type": "string", "format": "ipv4"},
    "format uuid": {"type": "string", "format": "uuid"},
    "format email": {"type": "string", "format": "email"},
    "integer range": {"type": "integer", "minimum": -17, "maximum": 1203},
    "exclusive range": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2.5},
    "multipleOf": {"type": "integer", "multipleOf": 7},
    "number": {"type": "number"},
    "array": {"type": "array", "items": INT, "minItems": 1, "maxItems": 3},
    "prefixItems": {"type": "array", "prefixItems": [INT, STR], "items": {"type": "boolean"}, "maxItems": 4},
    "closed tuple": {"type": "array", "prefixItems": [INT, {"type": "null"}], "items": False, "minItems": 2},
    "object": {**OBJECT, "properties": {"a": INT, "b": {"type": "boolean"}}, "required": ["a", "b"]},
    "closed": {**OBJECT, "properties": {"a": INT, "b": STR}, "required": ["b"], "additionalProperties": False},
    "optional": {**OBJECT, "properties": {"a": INT, "b": INT, "c": INT}, "additionalProperties": False},
    "additionalProperties": {**OBJECT, "properties": {"a": STR}, "additionalProperties": INT},
    "patternProperties": {
        **OBJECT,
        "properties": {"a": INT},
        "patternProperties": {"^s_": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "minProperties": {**OBJECT, "additionalProperties": INT, "minProperties": 1, "maxProperties": 2},
    "anyOf": {"anyOf": [INT, {**OBJECT, "properties": {"k": {"const": 1}}, "required": ["k"]}]},
    "oneOf": {
        "oneOf": [
            {**OBJECT, "properties": {"t": {"const": "a"}, "x": INT}, "required": ["t", "x"]},
            {**OBJECT, "properties": {"t": {"const": "b"}, "y": {"type": "null"}}, "required": ["t", "y"]},
        ]
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 300}]},
    "allOf objects": {
        "allOf": [
            {**OBJECT, "properties": {"a": INT}, "required": ["a"]},
            {**OBJECT, "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "refs": {
        "$defs": {"p": {**OBJECT, "properties": {"x": INT}, "required": ["x"], "additionalProperties": False}},
        "type": "array",
        "items": {"$ref": "#/$defs/p"},
        "maxItems": 2,
    },
    "recursion": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                **OBJECT,
                "properties": {"v": INT, "c": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
                "required": ["v", "c"],
                "additionalProperties": False,
            }
        },
    },
    "annotations": {"title": "T", "description": "d", "default": 1, "examples": [2], "x-own": {"not": {}}, **INT},
    "keywords as names": {**OBJECT, "properties": {"not": INT, "if": INT}, "required": ["not", "if"]},
}

REFUSED: dict[str, Any] = {
    "not": {"not": STR},
    "if": {"if": STR, "then": {"minLength": 2}},
    "uniqueItems": {"type": "array", "items": INT, "uniqueItems": True},
    "contains": {"type": "array", "contains": INT},
    "propertyNames": {**OBJECT, "propertyNames": {"pattern": "^a"}},
    "dependentRequired": {**OBJECT, "dependentRequired": {"a": ["b"]}},
    "dependencies": {**OBJECT, "dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {**OBJECT, "unevaluatedProperties": False},
    "oneOf": {"oneOf": [INT, {"type": "number"}]},
    "nope": {"type": "string", "format": "nope"},
    "texts": {"type": "texts"},
    "look-around": {"type": "string", "pattern": "(?=a)b"},
    "backreferences": {"type": "string", "pattern": r"(a)\1"},
    "minimum": {"type": "integer", "minimum": 5, "maximum": 3},
    "$defs/nope": {"$ref": "#/$defs/nope"},
    "x-guidance does not turn refusals off: uniqueItems": {
        "x-guidance": {"lenient": True},
        "type": "array",
        "uniqueItems": True,
    },
}
