//! Half-open ranges of bytes: which of a file are there.

use std::ops::Range;

use rollspan_generate::ApiError;
use serde_json::{Value, json};

/// Names a range of a file, in a request.
pub(crate) const CONTENT_RANGE: &str = "Content-Range";

/// Digits of a number of bytes; no file comes near.
const DIGITS: usize = 15;

/// A set of bytes as its ranges: sorted, apart from each other, none empty.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ByteRanges(Vec<Range<u64>>);

impl ByteRanges {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a range; ranges that touch become one.
    pub fn add(&mut self, mut added: Range<u64>) {
        if added.is_empty() {
            return;
        }
        self.0.retain(|range| {
            let apart = range.end < added.start || range.start > added.end;
            if !apart {
                added = added.start.min(range.start)..added.end.max(range.end);
            }
            apart
        });
        let place = self.0.partition_point(|range| range.start < added.start);
        self.0.insert(place, added);
    }

    /// Removes a range.
    pub fn remove(&mut self, removed: &Range<u64>) {
        if removed.is_empty() {
            return;
        }
        let pieces = self.0.iter().flat_map(|range| {
            let before = range.start..range.end.min(removed.start);
            let behind = range.start.max(removed.end)..range.end;
            [before, behind]
        });
        self.0 = pieces.filter(|piece| !piece.is_empty()).collect();
    }

    /// The first range of bytes 0 to `total - 1` that is not there; `None` when all are.
    pub fn missing(&self, total: u64) -> Option<Range<u64>> {
        let start = self.0.first().filter(|range| range.start == 0).map_or(0, |range| range.end);
        let end = self.0.iter().map(|range| range.start).find(|later| *later > start);
        (start < total).then(|| start..end.unwrap_or(total).min(total))
    }

    /// `[[start, end], ...]`
    pub fn to_json(&self) -> Value {
        self.0.iter().map(|range| json!([range.start, range.end])).collect()
    }
}

/// Reads the value of a Content-Range header: the range, and the size of the whole file.
///
/// # Errors
/// It is not of the one form that this server takes.
pub(crate) fn parse_content_range(text: &str) -> Result<(Range<u64>, u64), ApiError> {
    parsed(text.trim()).ok_or_else(|| {
        let allowed = "bytes FIRST-LAST/TOTAL with FIRST <= LAST < TOTAL";
        ApiError::wrong(CONTENT_RANGE, allowed, &text.into()).with_param(CONTENT_RANGE)
    })
}

fn parsed(text: &str) -> Option<(Range<u64>, u64)> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last, total) = (number(first)?, number(last)?, number(total)?);
    (first <= last && last < total).then_some((first..last + 1, total))
}

fn number(digits: &str) -> Option<u64> {
    let fits = (1..=DIGITS).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit());
    digits.parse().ok().filter(|_| fits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn ranges_are_the_set_of_their_bytes(steps in vec((any::<bool>(), 0_u64..12, 0_u64..12), 0..20)) {
            let mut ranges = ByteRanges::default();
            let mut bytes = [false; 24];
            for (adds, start, length) in steps {
                let range = start..start + length;
                if adds { ranges.add(range.clone()) } else { ranges.remove(&range) }
                for byte in range {
                    bytes[usize::try_from(byte).unwrap()] = adds;
                }
            }
            let there = |byte: u64| ranges.0.iter().any(|range| range.contains(&byte));
            let expected: Vec<bool> = (0..24).map(there).collect();
            prop_assert_eq!(&expected[..], &bytes[..]);
            let apart = ranges.0.windows(2).all(|pair| pair[0].end < pair[1].start);
            prop_assert!(apart && ranges.0.iter().all(|range| !range.is_empty()), "{:?}", ranges);
            for total in 0..24_u64 {
                let missing: Vec<u64> = (0..total).filter(|byte| !there(*byte)).collect();
                let found = ranges.missing(total);
                prop_assert_eq!(found.as_ref().map(|range| range.start), missing.first().copied());
                prop_assert!(found.is_none_or(|mut range| range.all(|byte| missing.contains(&byte))));
            }
        }
    }

    #[test]
    fn only_whole_ranges_of_known_files_are_read() {
        assert_eq!(parse_content_range("bytes 0-0/1"), Ok((0..1, 1)));
        assert_eq!(parse_content_range(" bytes 5-9/20 "), Ok((5..10, 20)));
        for text in ["", "bytes */20", "bytes 0-9/*", "bytes 9-5/20", "bytes 0-20/20", "bytes 0-/20", "bytes +0-1/20"] {
            let error = parse_content_range(text).unwrap_err();
            assert_eq!((error.status(), error.param.as_deref()), (400, Some("Content-Range")), "{text}");
        }
        assert!(parse_content_range("bytes 0-9999999999999999/99999999999999999").is_err());
        assert!(parse_content_range("items 0-1/2").is_err());
    }
}
