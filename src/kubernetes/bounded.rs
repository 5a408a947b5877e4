//! Parses JSON of any client into bounded memory. A small element becomes a large value: `{}` has 2
//! bytes, and a volume of a pod more than a hundred. Therefore types for such input name only the
//! fields that are used, in the lists and maps of this module, and a document has at most
//! [`MAX_ELEMENTS`] elements in all of them together. Unknown fields are skipped and take no memory.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use serde::de::{DeserializeOwned, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Maximum elements of all lists and maps of a document that are read.
pub const MAX_ELEMENTS: usize = 5_000;

thread_local! {
    /// Elements that the document may still have which this thread parses: serde passes no state to
    /// nested types. Outside of [`parse`] there is no limit.
    static LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// A parsed document.
#[derive(Debug)]
pub struct Parsed<T> {
    pub value: T,
    /// Elements in its lists and maps.
    pub elements: usize,
}

/// Why a document cannot be parsed.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {error}")]
pub struct Error {
    /// The field.
    pub path: String,
    pub error: serde_json::Error,
}

/// Parses a document of at most [`MAX_ELEMENTS`] elements.
///
/// # Errors
/// It is not such a document.
pub fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<Parsed<T>, Error> {
    /// Ends the limit, also after a panic.
    struct Unlimited;
    impl Drop for Unlimited {
        fn drop(&mut self) {
            LEFT.set(usize::MAX);
        }
    }
    LEFT.set(MAX_ELEMENTS);
    let _end = Unlimited;
    let mut source = serde_json::Deserializer::from_slice(json);
    let value = serde_path_to_error::deserialize(&mut source)
        .map_err(|error| Error { path: error.path().to_string(), error: error.into_inner() })?;
    source.end().map_err(|error| Error { path: ".".to_owned(), error })?;
    Ok(Parsed { value, elements: MAX_ELEMENTS - LEFT.get() })
}

/// Counts an element that this thread has parsed.
///
/// # Errors
/// The document has more than [`MAX_ELEMENTS`].
fn take<E: serde::de::Error>() -> Result<(), E> {
    match LEFT.get() {
        0 => Err(E::custom(format!(
            "the object has more than {MAX_ELEMENTS} elements in the lists that are read; remove some"
        ))),
        left => {
            LEFT.set(left - 1);
            Ok(())
        }
    }
}

/// A list. `null` and a missing field are an empty one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List<T>(Vec<T>);

/// A map with texts as keys. `null` and a missing field are an empty one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Map<T>(BTreeMap<String, T>);

/// The presence of an object whose content is not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Present;

impl<T> Default for List<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Default for Map<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> List<T> {
    pub fn into_inner(self) -> Vec<T> {
        self.0
    }
}

impl<T> Map<T> {
    pub fn into_inner(self) -> BTreeMap<String, T> {
        self.0
    }
}

impl<T> Deref for List<T> {
    type Target = Vec<T>;

    fn deref(&self) -> &Vec<T> {
        &self.0
    }
}

impl<T> Deref for Map<T> {
    type Target = BTreeMap<String, T>;

    fn deref(&self) -> &BTreeMap<String, T> {
        &self.0
    }
}

impl<'a, T> IntoIterator for &'a List<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ListVisitor(PhantomData))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Map<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MapVisitor(PhantomData))
    }
}

impl<'de> Deserialize<'de> for Present {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        serde::de::IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

struct ListVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ListVisitor<T> {
    type Value = List<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<List<T>, E> {
        Ok(List::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<List<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(element) = elements.next_element()? {
            take()?;
            list.push(element);
        }
        Ok(List(list))
    }
}

struct MapVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for MapVisitor<T> {
    type Value = Map<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Map<T>, E> {
        Ok(Map::default())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Map<T>, A::Error> {
        let mut map = BTreeMap::new();
        while let Some((key, value)) = entries.next_entry::<String, T>()? {
            take()?;
            if map.insert(key, value).is_some() {
                return Err(A::Error::custom("has a key twice"));
            }
        }
        Ok(Map(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Document {
        #[serde(default)]
        outer: List<Inner>,
        #[serde(default)]
        map: Map<String>,
        #[serde(default)]
        present: Option<Present>,
    }

    #[derive(Debug, Default, Deserialize)]
    struct Inner {
        #[serde(default)]
        inner: List<Present>,
    }

    fn list(element: &str, count: usize) -> String {
        format!("[{}]", vec![element; count].join(","))
    }

    #[test]
    fn elements_of_all_lists_count_together() {
        let rest = MAX_ELEMENTS - 3;
        let text = format!(
            r#"{{"outer":[{{}},{{"inner":{}}}],"map":{{"a":"b"}},"present":{{"x":[1,2]}},"other":{}}}"#,
            list("{}", rest),
            list("{}", 3 * MAX_ELEMENTS)
        );
        let parsed = parse::<Document>(text.as_bytes()).unwrap();
        assert_eq!(parsed.elements, MAX_ELEMENTS);
        let Document { outer, map, present } = parsed.value;
        assert!(outer[1].inner.len() == rest && map.len() == 1 && present.is_some());
        let more = text.replacen("{}", "{},{}", 1);
        let error = parse::<Document>(more.as_bytes()).unwrap_err();
        assert!(error.to_string().contains("more than 5000 elements"), "{error}");
        // Only inside of `parse`.
        assert!(serde_json::from_str::<Document>(&more).is_ok());
    }

    #[test]
    fn an_error_names_the_list_with_too_many_elements() {
        let text = format!(r#"{{"outer":[{{"inner":{}}}]}}"#, list("{}", MAX_ELEMENTS + 1));
        let error = parse::<Document>(text.as_bytes()).unwrap_err();
        assert_eq!(error.path, "outer[0].inner");
        let error = parse::<Document>(br#"{"map":{"a":1}}"#).unwrap_err();
        assert_eq!(error.path, "map.a");
    }

    #[test]
    fn null_and_missing_lists_are_empty() {
        let parsed = parse::<Document>(br#"{"outer":null,"map":null,"present":null}"#).unwrap();
        let Document { outer, map, present } = parsed.value;
        assert!(outer.is_empty() && map.is_empty() && present.is_none());
        assert!(parse::<Document>(br#"{"map":{"a":"1","a":"2"}}"#).is_err());
        assert!(parse::<Document>(b"{} {}").is_err());
    }
}
