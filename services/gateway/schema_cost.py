"""How large a JSON schema becomes when its alternatives are multiplied out, as the grammar compiler does. Pure.

Beside `anyOf`, a schema's own properties are compiled once for each alternative: fifteen levels of three made a gateway
take 20 GB, long after the request had been refused for its time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

MAX_COST = 20_000
_EMBEDDED = re.compile(r"%json\s*")  # in a Lark grammar
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else")
_EITHER = ("anyOf", "oneOf")
_LISTED = (*_EITHER, "allOf", "prefixItems", "items")

Schema = Mapping[str, Any]


def grammar_cost(grammar: str) -> int:
    """That of the dearest schema in a grammar: llguidance's JSON form, or Lark. What cannot be read costs nothing."""
    try:
        return max(map(schema_cost, _schemas(grammar)), default=0)
    except RecursionError:
        return MAX_COST + 1


def schema_cost(schema: Any) -> int:
    """Schemas that there are to compile; above `MAX_COST` it is not exact. Raises RecursionError."""
    return _Alternatives(schema).cost(schema)


def _schemas(grammar: str) -> Iterator[Any]:
    try:
        parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    except (ValueError, KeyError):
        return
    for part in parts:
        if "json_schema" in part:
            yield part["json_schema"]
        text = part.get("lark_grammar") or ""
        for found in _EMBEDDED.finditer(text):
            try:
                yield json.JSONDecoder().raw_decode(text, found.end())[0]
            except ValueError:
                continue


class _Alternatives:
    """Of the parts of one schema; each part is looked at once, and one that leads back to itself counts as one."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, int] = {}  # by identity: the parts live as long as the whole

    def cost(self, schema: Any) -> int:
        if not isinstance(schema, Mapping):
            return 1
        inner = [each for key in _NAMED if isinstance(schema.get(key), Mapping) for each in schema[key].values()]
        inner += [schema[key] for key in _SINGLE if isinstance(schema.get(key), Mapping)]
        listed = [each for key in _LISTED if isinstance(schema.get(key), list) for each in schema[key]]
        own = self.of(schema) * (1 + sum(map(self.cost, inner)))
        return min(own + sum(map(self.cost, listed)), MAX_COST + 1)

    def of(self, schema: Any) -> int:
        """Alternatives that a schema is multiplied out to at its own level."""
        if not isinstance(schema, Mapping):
            return 1
        if id(schema) not in self._known:
            self._known[id(schema)] = 1
            self._known[id(schema)] = min(self._of(schema), MAX_COST + 1)
        return self._known[id(schema)]

    def _of(self, schema: Schema) -> int:
        either = [max(sum(map(self.of, schema[key])), 1) for key in _EITHER if isinstance(schema.get(key), list)]
        together = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
        if isinstance(schema.get("$ref"), str):
            together = [*together, self._target(schema["$ref"])]
        return prod(either) * prod(map(self.of, together))

    def _target(self, reference: str) -> Any:
        """What a reference within the schema points to; nothing where there is nothing."""
        found = self._root
        for word in reference.removeprefix("#").strip("/").split("/"):
            found = found.get(word) if isinstance(found, Mapping) else None
        return found
