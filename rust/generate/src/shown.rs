//! Values in error messages: compact JSON of bounded length, spelled alike in both frontends.

use std::fmt::Write as _;

use serde_json::{Number, Value};

/// Characters of a value that a message shows.
const SHOWN_CHARACTERS: usize = 64;

/// `value` as compact JSON, cut to 64 characters and "...".
pub fn shown(value: &Value) -> String {
    let mut text = String::new();
    write_value(&mut text, value);
    cut(&text)
}

/// A client's text for an error message: at most 64 characters of it.
pub(crate) fn cut(name: &str) -> String {
    match name.char_indices().nth(SHOWN_CHARACTERS) {
        Some((end, _)) => format!("{}...", &name[..end]),
        None => name.to_owned(),
    }
}

/// Long enough to be cut: what follows would not show. At most four bytes a character.
fn is_full(text: &str) -> bool {
    text.len() > 4 * SHOWN_CHARACTERS
}

fn write_value(text: &mut String, value: &Value) {
    match value {
        Value::Number(number) => write_number(text, number),
        Value::Array(values) => {
            text.push('[');
            for (index, value) in values.iter().enumerate() {
                if is_full(text) {
                    return;
                }
                if index > 0 {
                    text.push(',');
                }
                write_value(text, value);
            }
            text.push(']');
        }
        Value::Object(entries) => {
            text.push('{');
            for (index, (key, value)) in entries.iter().enumerate() {
                if is_full(text) {
                    return;
                }
                if index > 0 {
                    text.push(',');
                }
                write_string(text, key);
                text.push(':');
                write_value(text, value);
            }
            text.push('}');
        }
        Value::String(string) => write_string(text, string),
        Value::Null => text.push_str("null"),
        Value::Bool(value) => text.push_str(if *value { "true" } else { "false" }),
    }
}

fn write_string(text: &mut String, string: &str) {
    let end = string.char_indices().nth(SHOWN_CHARACTERS + 1).map_or(string.len(), |(end, _)| end);
    // The quote and the cut-off are behind what can be shown, so cutting early changes nothing.
    text.push_str(&Value::from(&string[..end]).to_string());
}

/// Integers as they are; floats with the fewest digits that give the same value back, with an exponent outside
/// 1e-4 to 1e16: how Python writes them.
fn write_number(text: &mut String, number: &Number) {
    if !number.is_f64() {
        text.push_str(&number.to_string());
        return;
    }
    let value = number.as_f64().unwrap_or_default();
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    let shown = if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        if plain.contains('.') { write!(text, "{plain}") } else { write!(text, "{plain}.0") }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        write!(text, "{mantissa}e{sign}{:02}", exponent.abs())
    };
    debug_assert!(shown.is_ok(), "writing to a string cannot fail");
}
