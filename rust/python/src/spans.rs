//! `SpanBuilder` for Python; `rollspan.spans.SpanBuilder` is its definition.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use rollspan_generate::Spans;

/// Collects the stamps of one output sequence. O(1) for each engine output, O(spans) memory.
#[pyclass(module = "rollspan._native")]
#[derive(Default)]
pub(crate) struct SpanBuilder {
    spans: rollspan_generate::SpanBuilder,
}

type Pair<'py> = (Option<Bound<'py, PyList>>, Option<Bound<'py, PyList>>);

#[pymethods]
impl SpanBuilder {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Number of tokens pushed so far.
    #[getter]
    fn tokens(&self) -> usize {
        self.spans.tokens()
    }

    /// Record that the next `tokens` output tokens were sampled under this label and commit number.
    fn push(&mut self, version: Option<&str>, commit: Option<u64>, tokens: isize) -> PyResult<()> {
        let count = usize::try_from(tokens)
            .map_err(|_| PyValueError::new_err(format!("tokens must be at least 0, got {tokens}")))?;
        self.spans.push(version, commit, count);
        Ok(())
    }

    /// Version spans and commit spans of the first `total` tokens (default: all).
    #[pyo3(signature = (total=None))]
    fn finish<'py>(&self, py: Python<'py>, total: Option<isize>) -> PyResult<Pair<'py>> {
        let end = total.map_or_else(|| self.spans.tokens().try_into(), Ok)?;
        self.between(py, 0, end)
    }

    /// Version spans and commit spans of tokens `start` to `end - 1`.
    fn between<'py>(&self, py: Python<'py>, start: isize, end: isize) -> PyResult<Pair<'py>> {
        let tokens = self.spans.tokens();
        match (usize::try_from(start), usize::try_from(end)) {
            (Ok(first), Ok(last)) if first <= last && last <= tokens => lists(py, self.spans.between(first, last)),
            _ => Err(PyValueError::new_err(format!(
                "spans of tokens {start} to {end} asked for, but tokens 0 to {tokens} were recorded"
            ))),
        }
    }
}

fn lists(py: Python<'_>, spans: Spans) -> PyResult<Pair<'_>> {
    let entry = |name: &str, value: Bound<'_, PyAny>, start: usize, end: usize| {
        let dict = PyDict::new(py);
        dict.set_item(name, value)?;
        dict.set_item("start", start)?;
        dict.set_item("end", end)?;
        Ok::<_, PyErr>(dict.unbind())
    };
    let versions = spans.versions.map(|spans| {
        let entries = spans
            .into_iter()
            .map(|span| entry("version", span.version.as_deref().into_pyobject(py)?.into_any(), span.start, span.end));
        PyList::new(py, entries.collect::<PyResult<Vec<_>>>()?)
    });
    let commits = spans.commits.map(|spans| {
        let entries = spans
            .into_iter()
            .map(|span| entry("commit", span.commit.into_pyobject(py)?.into_any(), span.start, span.end));
        PyList::new(py, entries.collect::<PyResult<Vec<_>>>()?)
    });
    Ok((versions.transpose()?, commits.transpose()?))
}
