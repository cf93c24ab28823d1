"""What form the output must have, as OpenAI and as vLLM ask for it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from .base import OBJECT, TEXT, RequestModel, Unsupported, json_kind


def _schema_kind(value: object) -> str | None:
    return json_kind(value) if isinstance(value, str | dict) else None


JsonSchema = Annotated[
    Annotated[str, Tag(TEXT), Field(min_length=1)] | Annotated[dict[str, Any], Tag(OBJECT)],
    Discriminator(
        _schema_kind,
        custom_error_type="json_schema",
        custom_error_message="Expected a JSON schema, as an object or as text",
    ),
]
"""A JSON schema, as an object or as text."""
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=2**16)]


class TextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """A JSON object, whatever it holds."""

    type: Literal["json_object"]


class NamedJsonSchema(RequestModel):
    """A JSON schema with a name."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Of no effect.")
    description: str | None = Field(None, description="Of no effect; the model sees the prompt alone.")
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema that the output follows.")
    strict: bool | None = Field(None, description="Of no effect: the output always follows the schema.")


class JsonSchemaFormat(RequestModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedJsonSchema


def _format(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>"


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(
        _format,
        custom_error_type="response_format",
        custom_error_message="Expected an object whose type is 'text', 'json_object' or 'json_schema'",
    ),
]


class StructuredOutputs(RequestModel):
    """vLLM's ``structured_outputs``: exactly one form."""

    json_: JsonSchema | None = Field(None, alias="json", description="JSON that follows this schema.")
    regex: str | None = Field(None, min_length=1, description="Text that matches this regular expression as a whole.")
    choice: Choices | None = Field(None, description="One of these texts.")
    grammar: str | None = Field(None, min_length=1, description="Text of this grammar, in Lark's syntax or GBNF.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    whitespace_pattern: str | None = Field(None, description="What may stand between the parts of JSON.")
    disable_any_whitespace: bool = Field(False, description="Nothing may stand between the parts of JSON.")
    disable_fallback: bool = Field(False, description="Of no effect: there is only one grammar engine.")
    disable_additional_properties: Annotated[
        Literal[False], Unsupported("schemas are taken at their word; expected additionalProperties in the schema")
    ] = False
    structural_tag: Annotated[None, Unsupported("structural tags are not offered; expected another form")] = None
