//! Texts that look like the call that makes a value.

use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;

/// A call in the making.
pub(super) struct Call<'py> {
    py: Python<'py>,
    name: String,
    arguments: Vec<String>,
}

impl<'py> Call<'py> {
    pub(super) fn new(py: Python<'py>, name: String) -> Self {
        Self {
            py,
            name,
            arguments: Vec::new(),
        }
    }

    /// A positional argument.
    pub(super) fn value(&mut self, value: impl IntoPyObjectExt<'py>) -> PyResult<()> {
        let text = value.into_bound_py_any(self.py)?.repr()?.to_string();
        self.arguments.push(text);
        Ok(())
    }

    /// A keyword argument, left out if it has its default.
    pub(super) fn keyword<T>(&mut self, name: &str, value: T, default: T) -> PyResult<()>
    where
        T: IntoPyObjectExt<'py>,
    {
        let value = value.into_bound_py_any(self.py)?;
        if !value.eq(default.into_bound_py_any(self.py)?)? {
            self.arguments.push(format!("{name}={}", value.repr()?));
        }
        Ok(())
    }

    /// A mapping whose values are not shown.
    pub(super) fn count(&mut self, name: &str, count: usize) {
        if count > 0 {
            let plural = if count == 1 { "" } else { "s" };
            self.arguments.push(format!("{name}=<{count} variable{plural}>"));
        }
    }

    pub(super) fn finish(self) -> String {
        format!("{}({})", self.name, self.arguments.join(", "))
    }
}
