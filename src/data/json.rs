//! JSON values whose objects name each key once: serde_json alone would keep the last of two silently.

use std::{cell::RefCell, fmt};

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// A value, and the first key that an object in it has twice.
pub(super) type Checked = (Value, Option<String>);

/// Reads `text`, which must hold one value and nothing after it.
///
/// # Errors
/// Where the text is no JSON.
pub(super) fn parse(text: &str) -> Result<Checked, serde_json::Error> {
    let twice = RefCell::new(None);
    let mut from = serde_json::Deserializer::from_str(text);
    let value = Unique(&twice).deserialize(&mut from)?;
    from.end()?;
    Ok((value, twice.into_inner()))
}

/// Builds a [`Value`] and notes the first key that comes twice.
#[derive(Clone, Copy)]
struct Unique<'a>(&'a RefCell<Option<String>>);

impl<'de> DeserializeSeed<'de> for Unique<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Unique<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut found = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            found.push(item);
        }
        Ok(Value::Array(found))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut found = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if found.contains_key(&key) {
                self.0.borrow_mut().get_or_insert_with(|| key.clone());
            }
            found.insert(key, entries.next_value_seed(self)?);
        }
        Ok(Value::Object(found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_serde_json() {
        for text in
            ["null", "[1, -2, 1e3, 0.5, true, \"a\\u00e9\\n\"]", "{\"a\":{\"b\":[{}]},\"c\":\"\"}", " 3 "]
        {
            assert_eq!(parse(text).unwrap(), (serde_json::from_str(text).unwrap(), None), "{text}");
        }
        for text in ["", "{", "1 2", "{\"a\" 1}", "[1,]"] {
            let (ours, theirs) = (parse(text).unwrap_err(), serde_json::from_str::<Value>(text).unwrap_err());
            assert_eq!(ours.to_string(), theirs.to_string(), "{text}");
        }
    }

    #[test]
    fn a_key_that_comes_twice_is_found_at_any_depth() {
        let twice = |text| parse(text).unwrap().1;
        assert_eq!(twice("{\"a\":1,\"b\":2,\"a\":1}").as_deref(), Some("a"));
        assert_eq!(twice("{\"m\":[{\"role\":1,\"role\":2}]}").as_deref(), Some("role"));
        assert_eq!(twice("[{\"a\":1},{\"a\":2}]"), None);
    }
}
