//! Which engine of a set a request goes to. Pure; `tests/conformance/routing.json` holds both languages to it.

use std::cmp::Reverse;

/// The engine of a session, by rendezvous hashing: when engines come or go, only their own sessions move. `None` for no
/// engines.
///
/// The score of an engine is the first 8 bytes, little-endian, of BLAKE3(session id in UTF-8, a zero byte, engine index in
/// decimal); the highest score wins, then the lowest index.
pub(crate) fn session_engine(session_id: &str, engines: &[usize]) -> Option<usize> {
    let score = |index: usize| {
        let mut hasher = blake3::Hasher::new();
        hasher.update(session_id.as_bytes()).update(b"\0").update(index.to_string().as_bytes());
        let mut head = [0; 8];
        hasher.finalize_xof().fill(&mut head);
        u64::from_le_bytes(head)
    };
    engines.iter().copied().max_by_key(|index| (score(*index), Reverse(*index)))
}

/// The engine with the fewest open requests; of several the first one behind the engine that was chosen `last`, round and
/// round. `None` for no engines.
pub(crate) fn least_loaded(open_requests: &[(usize, usize)], last: Option<usize>) -> Option<usize> {
    let behind = |index: usize| last.is_some_and(|last| index <= last);
    let best = open_requests.iter().min_by_key(|(index, count)| (*count, behind(*index), *index));
    best.map(|(index, _)| *index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::path::Path;

    fn cases(part: &str) -> Vec<Value> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/conformance/routing.json");
        let file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        file[part].as_array().unwrap().clone()
    }

    fn index(value: &Value) -> Option<usize> {
        value.as_u64().map(|index| usize::try_from(index).unwrap())
    }

    #[test]
    fn a_session_goes_to_the_engine_of_its_vector() {
        for case in cases("sessions") {
            let engines: Vec<usize> = case["engines"].as_array().unwrap().iter().filter_map(index).collect();
            let chosen = session_engine(case["session_id"].as_str().unwrap(), &engines);
            assert_eq!(chosen, index(&case["engine"]), "{case}");
        }
        assert_eq!(session_engine("a", &[]), None);
    }

    #[test]
    fn load_is_spread_as_its_vector_says() {
        for case in cases("least_loaded") {
            let counts = case["open_requests"].as_object().unwrap().iter();
            let counts: Vec<_> = counts.map(|(name, count)| (name.parse().unwrap(), index(count).unwrap())).collect();
            assert_eq!(least_loaded(&counts, index(&case["after"])), index(&case["engine"]), "{case}");
        }
        assert_eq!(least_loaded(&[], None), None);
    }
}
