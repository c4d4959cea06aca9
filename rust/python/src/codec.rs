//! `decode_outputs` for Python: the decoder of the Rust frontend, giving the dataclasses of `rollspan.protocol.messages`.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyList};
use rollspan_protocol::{
    Body, DecodeError, Decoded, EngineCoreOutput, EngineCoreOutputs, LogprobsLists, PrefillStats, RoutedExperts,
    SchedulerStats, StampSpan, StopReason, UtilityOutput,
};
use serde_json::Value;

use crate::detached::run_detached;

/// The Python objects that messages are made of, imported once.
struct Classes {
    outputs: Py<PyAny>,
    output: Py<PyAny>,
    utility: Py<PyAny>,
    logprobs: Py<PyAny>,
    pack_each: Py<PyAny>,
    error: Py<PyAny>,
    /// By their number on the wire.
    finish_reasons: Py<PyAny>,
    decode_error: Py<PyAny>,
    from_buffer: Py<PyAny>,
}

static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();

impl Classes {
    fn get(py: Python<'_>) -> PyResult<&Self> {
        CLASSES.get_or_try_init(py, || {
            let messages = py.import("rollspan.protocol.messages")?;
            let class = |name: &str| messages.getattr(name).map(Bound::unbind);
            Ok(Self {
                outputs: class("EngineCoreOutputs")?,
                output: class("EngineCoreOutput")?,
                utility: class("UtilityOutput")?,
                logprobs: class("LogprobsLists")?,
                pack_each: py.import("rollspan.protocol.packed_logprobs")?.getattr("pack_each")?.unbind(),
                error: class("EngineError")?,
                finish_reasons: PyList::new(
                    py,
                    messages.getattr("FinishReason")?.try_iter()?.collect::<PyResult<Vec<_>>>()?,
                )?
                .into_any()
                .unbind(),
                decode_error: py.import("rollspan.protocol.codec")?.getattr("DecodeError")?.unbind(),
                from_buffer: py.import("numpy")?.getattr("frombuffer")?.unbind(),
            })
        })
    }
}

/// Reads an OUTPUTS message: the envelope and its auxiliary buffers, if any.
///
/// Like `rollspan.protocol.codec.decode_outputs`, except that maps of counters hold only the counters that are used.
#[pyfunction]
pub(crate) fn decode_outputs<'py>(py: Python<'py>, frames: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let classes = Classes::get(py)?;
    let frames: Vec<Bound<'py, PyBytes>> = frames.extract()?;
    let frames: Vec<&[u8]> = frames.iter().map(PyBytesMethods::as_bytes).collect();
    let bytes = frames.iter().map(|frame| frame.len()).sum();
    match run_detached(py, bytes, || rollspan_protocol::decode_outputs(&frames)) {
        Ok(decoded) => message(py, classes, decoded),
        Err(error) => Err(raised(py, classes, &error)?),
    }
}

fn raised(py: Python<'_>, classes: &Classes, error: &DecodeError) -> PyResult<PyErr> {
    let exception = classes.decode_error.bind(py).call1((error.reason(), error.to_string()))?;
    Ok(PyErr::from_value(exception))
}

fn message<'py>(
    py: Python<'py>,
    classes: &Classes,
    decoded: Decoded<EngineCoreOutputs>,
) -> PyResult<Bound<'py, PyAny>> {
    let EngineCoreOutputs { engine_index, timestamp, weight_version, weight_commit, body } = decoded.value;
    let (mut outputs, mut stats, mut utility, mut finished) = (PyList::empty(py), None, None, None);
    let (mut wave_complete, mut start_wave) = (None, None);
    match body {
        Body::Batch(mut batch) => {
            let packed = packed_logprobs(py, classes, &mut batch.outputs)?;
            let made = batch.outputs.into_iter().zip(packed).map(|(one, packed)| output(py, classes, one, packed));
            outputs = PyList::new(py, made.collect::<PyResult<Vec<_>>>()?)?;
            stats = batch.scheduler_stats.map(|stats| scheduler_stats(py, &stats)).transpose()?;
            finished = batch.finished_requests;
        }
        Body::Utility(reply) => utility = Some(utility_output(py, classes, reply)?),
        Body::WaveComplete(wave) => wave_complete = Some(wave),
        Body::StartWave(wave) => start_wave = Some(wave),
    }
    classes.outputs.bind(py).call1((
        engine_index,
        outputs,
        stats,
        timestamp,
        utility,
        finished,
        wave_complete,
        start_wave,
        weight_version.as_deref(),
        weight_commit,
        decoded.skipped_fields,
    ))
}

/// `packed` stands for the output's own log-probs.
fn output<'py>(
    py: Python<'py>,
    classes: &Classes,
    output: EngineCoreOutput,
    packed: Option<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let logprobs = match packed {
        None => output.new_logprobs.map(|lists| logprobs_lists(py, classes, &lists)).transpose()?,
        packed => packed,
    };
    let prompt_logprobs = output.new_prompt_logprobs.map(|lists| logprobs_lists(py, classes, &lists)).transpose()?;
    let experts = output.routed_experts.map(|experts| routed_experts(py, classes, &experts)).transpose()?;
    let finish_reason =
        output.finish_reason.map(|reason| classes.finish_reasons.bind(py).get_item(reason as usize)).transpose()?;
    let stop_reason = match output.stop_reason {
        None => None,
        Some(StopReason::Token(token)) => Some(token.into_pyobject(py)?.into_any()),
        Some(StopReason::Text(text)) => Some(text.into_pyobject(py)?.into_any()),
    };
    let error = output
        .error
        .map(|error| {
            let class = classes.error.bind(py);
            class.call1((error.code, error.message, error.retryable, error.param, error.reason))
        })
        .transpose()?;
    classes.output.bind(py).call1((
        output.request_id,
        PyList::new(py, output.new_token_ids)?,
        logprobs,
        finish_reason,
        stop_reason,
        output.prefill_stats.map(|stats| prefill_stats(py, stats)).transpose()?,
        error,
        output.admission.map(|stamp| (stamp.weight_version.to_string(), stamp.weight_commit)),
        prompt_logprobs,
        experts,
        output.kv_spans.map(stamp_spans),
        output.prompt_spans.map(stamp_spans),
    ))
}

/// (label, commit number, start, end) of each.
fn stamp_spans(spans: Vec<StampSpan>) -> Vec<(String, u64, u32, u32)> {
    let spans = spans.into_iter();
    spans.map(|span| (span.weight_version.to_string(), span.weight_commit, span.start, span.end)).collect()
}

/// Takes the log-probs of the outputs with one position, nearly all, and makes Python's of them all at once: an object of
/// each instead of three arrays.
fn packed_logprobs<'py>(
    py: Python<'py>,
    classes: &Classes,
    outputs: &mut [EngineCoreOutput],
) -> PyResult<Vec<Option<Bound<'py, PyAny>>>> {
    let mut by_width: BTreeMap<usize, (LogprobsLists, Vec<usize>)> = BTreeMap::new();
    for (place, output) in outputs.iter_mut().enumerate() {
        if let Some(lists) = output.new_logprobs.take_if(|lists| lists.positions() == 1) {
            let (all, places) = by_width.entry(lists.width).or_default();
            all.extend(&lists);
            places.push(place);
        }
    }
    let mut packed = vec![None; outputs.len()];
    for (all, places) in by_width.into_values() {
        let made = classes.pack_each.bind(py).call1((logprobs_lists(py, classes, &all)?,))?;
        for (place, one) in places.into_iter().zip(made.try_iter()?) {
            packed[place] = Some(one?);
        }
    }
    Ok(packed)
}

/// Arrays `[positions, k + 1]` twice and `[positions]`, read-only as those of the Python codec.
fn logprobs_lists<'py>(py: Python<'py>, classes: &Classes, lists: &LogprobsLists) -> PyResult<Bound<'py, PyAny>> {
    let array = |bytes: Vec<u8>, dtype: &str| classes.from_buffer.bind(py).call1((PyBytes::new(py, &bytes), dtype));
    let rows = |array: Bound<'py, PyAny>| array.call_method1("reshape", (lists.positions(), lists.width));
    let integers = |values: &[u32]| array(values.iter().flat_map(|value| value.to_le_bytes()).collect(), "<i4");
    let floats = array(lists.logprobs.iter().flat_map(|value| value.to_le_bytes()).collect(), "<f4")?;
    let ranks = integers(&lists.sampled_ranks)?;
    classes.logprobs.bind(py).call1((rows(integers(&lists.token_ids)?)?, rows(floats)?, ranks))
}

/// An array `[tokens, layers, top_k]`, read-only.
fn routed_experts<'py>(py: Python<'py>, classes: &Classes, experts: &RoutedExperts) -> PyResult<Bound<'py, PyAny>> {
    let flat = classes.from_buffer.bind(py).call1((PyBytes::new(py, experts.data()), experts.dtype()))?;
    flat.call_method1("reshape", (experts.shape().to_vec(),))
}

fn utility_output<'py>(py: Python<'py>, classes: &Classes, utility: UtilityOutput) -> PyResult<Bound<'py, PyAny>> {
    let class = classes.utility.bind(py);
    match utility.outcome {
        Ok(value) => class.call1((utility.call_id, None::<&str>, python_value(py, &value)?)),
        Err(failure) => class.call1((utility.call_id, failure.message, None::<&str>, failure.reason)),
    }
}

fn scheduler_stats<'py>(py: Python<'py>, stats: &SchedulerStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("num_running_reqs", stats.num_running_reqs)?;
    dict.set_item("num_waiting_reqs", stats.num_waiting_reqs)?;
    dict.set_item("kv_cache_usage", stats.kv_cache_usage)?;
    dict.set_item("step_counter", stats.step_counter)?;
    dict.set_item("num_preemptions", stats.num_preemptions)?;
    if let Some(cache) = stats.prefix_cache_stats {
        let counters = PyDict::new(py);
        counters.set_item("requests", cache.requests)?;
        counters.set_item("queries", cache.queries)?;
        counters.set_item("hits", cache.hits)?;
        counters.set_item("preempted_requests", cache.preempted_requests)?;
        dict.set_item("prefix_cache_stats", counters)?;
    }
    if let Some(paused) = stats.paused {
        dict.set_item("paused", paused)?;
    }
    if let Some(state) = &stats.weight_state {
        dict.set_item("weight_state", &**state)?;
    }
    if let Some(updates) = stats.weight_updates {
        let counters = PyDict::new(py);
        counters.set_item("success", updates.success)?;
        counters.set_item("failure", updates.failure)?;
        dict.set_item("weight_updates", counters)?;
    }
    if let Some(seconds) = stats.weight_update_seconds {
        let phases = PyDict::new(py);
        phases.set_item("receive", seconds.receive)?;
        phases.set_item("verify", seconds.verify)?;
        phases.set_item("prepare", seconds.prepare)?;
        phases.set_item("commit", seconds.commit)?;
        if let Some(stall) = seconds.stall {
            phases.set_item("stall", stall)?;
        }
        dict.set_item("weight_update_seconds", phases)?;
    }
    Ok(dict)
}

fn prefill_stats(py: Python<'_>, stats: PrefillStats) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("num_prompt_tokens", stats.num_prompt_tokens)?;
    dict.set_item("num_computed_tokens", stats.num_computed_tokens)?;
    dict.set_item("num_cached_tokens", stats.num_cached_tokens)?;
    Ok(dict)
}

fn python_value<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(value), _) => value.into_pyobject(py)?.into_any(),
            (_, Some(value)) => value.into_pyobject(py)?.into_any(),
            _ => number.as_f64().into_pyobject(py)?,
        },
        Value::String(text) => text.into_pyobject(py)?.into_any(),
        Value::Array(values) => {
            let values = values.iter().map(|value| python_value(py, value)).collect::<PyResult<Vec<_>>>()?;
            PyList::new(py, values)?.into_any()
        }
        Value::Object(entries) => {
            let dict = PyDict::new(py);
            for (key, value) in entries {
                dict.set_item(key, python_value(py, value)?)?;
            }
            dict.into_any()
        }
    })
}
