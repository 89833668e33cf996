//! Looking up programs on a worker's `PATH`.

use std::collections::HashMap;
use std::ffi::{CStr, CString};

use rustix::fs::{Access, AtFlags, CWD, FileType, accessat, stat};
use rustix::io::Errno;

use crate::event::{Stage, StartFailure};
use crate::spawn::environment::EnvTable;
use crate::spec::WorkerSpec;

/// Searched for a worker without a `PATH`.
const USUAL_PATH: &[u8] = b"/usr/local/bin:/usr/bin:/bin";

/// Results of a group's look-ups, by directory, search path and name. Most workers share all three.
#[derive(Default)]
pub(super) struct Programs(HashMap<(CString, Vec<u8>, CString), Result<CString, Errno>>);

impl Programs {
    /// Forgets all results: files come and go between two groups.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// The path of a worker's program.
    pub(super) fn find(&mut self, spec: &WorkerSpec, env: &EnvTable) -> Result<CString, StartFailure> {
        let program = &spec.argv[0];
        if program.as_bytes().contains(&b'/') {
            return Ok(program.clone());
        }
        let search = env.value(&spec.env, b"PATH").unwrap_or(USUAL_PATH);
        // Relative items of `PATH` start at the worker's own directory.
        let base = spec.cwd.as_deref().unwrap_or(c".");
        let key = (base.to_owned(), search.to_vec(), program.clone());
        let found = self
            .0
            .entry(key)
            .or_insert_with(|| find_program(program, search, base));
        found.clone().map_err(|errno| StartFailure {
            stage: Stage::Exec,
            errno: errno.raw_os_error(),
            path: Some(program.clone()),
        })
    }
}

/// Looks for an executable on a search path, as a shell does. The error tells a match that may not be executed from
/// no match at all. Relative items of the path are below `base`, and so is the result.
fn find_program(program: &CStr, search: &[u8], base: &CStr) -> Result<CString, Errno> {
    let mut error = Errno::NOENT;
    for directory in search.split(|byte| *byte == b':') {
        let directory = if directory.is_empty() { b"." } else { directory };
        let Ok(path) = CString::new([directory, b"/", program.to_bytes()].concat()) else {
            continue;
        };
        let seen = if directory.starts_with(b"/") {
            path.clone()
        } else {
            let seen = [base.to_bytes(), b"/", path.as_bytes()].concat();
            CString::new(seen).map_err(|_| Errno::INVAL)?
        };
        match accessat(CWD, seen.as_c_str(), Access::EXEC_OK, AtFlags::EACCESS) {
            Ok(()) if is_directory(&seen) => error = Errno::ACCESS,
            Ok(()) => return Ok(path),
            Err(Errno::ACCESS) => error = Errno::ACCESS,
            Err(_) => {}
        }
    }
    Err(error)
}

fn is_directory(path: &CStr) -> bool {
    stat(path).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_dir())
}

#[cfg(test)]
mod tests;
