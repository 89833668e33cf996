//! Records as a dict that JSON can hold, and as text for people who debug.

use std::ffi::OsString;

use pyo3::PyClass;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};

use super::Exit;

/// Version of the dict form. It changes when a field is removed or changes its meaning, not when a field is added.
pub(crate) const EVENT_VERSION: u32 = 1;

/// Names of the fields of a process that would not die.
const SURVIVOR: [&str; 5] = ["pid", "state", "name", "wchan", "errno"];
/// How many bytes of a longer value the text shows.
const SHOWN_BYTES: usize = 64;

/// A class with its fields, which are its attributes in Python.
pub(crate) trait Record: PyClass {
    const FIELDS: &'static [&'static str];
}

/// The dict of an event.
pub(super) fn event<'py, T: Record>(record: &Bound<'py, T>) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(record.py());
    dict.set_item("event", T::NAME)?;
    dict.set_item("version", EVENT_VERSION)?;
    fill(&dict, record)?;
    Ok(dict)
}

/// The fields alone, for a record that is part of an event.
pub(super) fn fields<'py, T: Record>(record: &Bound<'py, T>) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(record.py());
    fill(&dict, record)?;
    Ok(dict)
}

fn fill<T: Record>(dict: &Bound<'_, PyDict>, record: &Bound<'_, T>) -> PyResult<()> {
    for name in T::FIELDS {
        dict.set_item(name, plain(record.as_any().getattr(*name)?)?)?;
    }
    Ok(())
}

/// A value as JSON can hold it.
fn plain(value: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyAny>> {
    let py = value.py();
    if let Ok(bytes) = value.cast::<PyBytes>() {
        let options = PyDict::new(py);
        options.set_item("newline", false)?;
        let text = py
            .import("binascii")?
            .call_method("b2a_base64", (bytes,), Some(&options))?;
        return text.call_method1("decode", ("ascii",));
    }
    if value.is_instance_of::<PyString>() {
        let text: OsString = value.extract()?;
        return Ok(PyString::new(py, &text.to_string_lossy()).into_any());
    }
    if let Ok(exit) = value.cast::<Exit>() {
        return Ok(fields(exit)?.into_any());
    }
    if let Ok(list) = value.cast::<PyList>() {
        let items = list.iter().map(plain).collect::<PyResult<Vec<_>>>()?;
        return Ok(PyList::new(py, items)?.into_any());
    }
    if let Ok(survivor) = value.cast::<PyTuple>() {
        let dict = PyDict::new(py);
        for (name, value) in SURVIVOR.iter().zip(survivor.iter()) {
            dict.set_item(name, plain(value)?)?;
        }
        return Ok(dict.into_any());
    }
    Ok(value)
}

/// `Started(worker=0, pid=12, ...)`.
pub(crate) fn repr<T: Record>(record: &Bound<'_, T>) -> PyResult<String> {
    let field = |name: &&str| Ok(format!("{name}={}", shown(&record.as_any().getattr(*name)?)?));
    let fields = T::FIELDS.iter().map(field).collect::<PyResult<Vec<_>>>()?;
    Ok(format!("{}({})", T::NAME, fields.join(", ")))
}

fn shown(value: &Bound<'_, PyAny>) -> PyResult<String> {
    match value.cast::<PyBytes>() {
        Ok(bytes) if bytes.as_bytes().len() > SHOWN_BYTES => {
            let bytes = bytes.as_bytes();
            let begin = PyBytes::new(value.py(), &bytes[..SHOWN_BYTES]).repr()?;
            Ok(format!("<{} bytes, {begin}...>", bytes.len()))
        }
        _ => Ok(value.repr()?.to_string()),
    }
}
