//! What an output must look like.

use serde::Serialize;

use crate::fields::map_struct;

/// One of the first six, and options of it. What they say is the engine's to judge.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct StructuredOutputs {
    /// A JSON schema, as its text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub json: Option<String>,
    /// Any JSON object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub json_object: Option<bool>,
    /// A regular expression.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub regex: Option<String>,
    /// One of these texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub choice: Option<Vec<String>>,
    /// A grammar in EBNF.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grammar: Option<String>,
    /// Structure between tags, as its text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub structural_tag: Option<String>,
    /// JSON without optional white space.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disable_any_whitespace: Option<bool>,
    /// JSON without properties that the schema does not name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disable_additional_properties: Option<bool>,
    /// What white space may be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub whitespace_pattern: Option<String>,
}

map_struct! {
    StructuredOutputs:
    defaulted json,
    defaulted json_object,
    defaulted regex,
    defaulted choice,
    defaulted grammar,
    defaulted structural_tag,
    defaulted disable_any_whitespace,
    defaulted disable_additional_properties,
    defaulted whitespace_pattern,
}
