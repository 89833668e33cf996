//! The environment of workers.

use std::collections::HashMap;
use std::ffi::CStr;

use crate::spec::EnvEntry;
use crate::sys::clone::PointerArray;
use crate::tree::TOKEN_VARIABLE;

/// The group's environment with an index, so that a worker's few own entries cost what they are and no more.
pub(crate) struct EnvTable {
    entries: Vec<EnvEntry>,
    index: HashMap<Box<[u8]>, usize>,
}

impl EnvTable {
    pub(crate) fn new(base: &[EnvEntry], extra: EnvEntry) -> Self {
        let mut table = Self {
            entries: Vec::with_capacity(base.len() + 1),
            index: HashMap::new(),
        };
        for entry in base.iter().cloned().chain([extra]) {
            if let Some(&at) = table.index.get(entry.key()) {
                table.entries[at] = entry;
            } else {
                table.index.insert(entry.key().into(), table.entries.len());
                table.entries.push(entry);
            }
        }
        table
    }

    /// The environment of a worker with entries of its own. None of them replaces the job's mark.
    pub(super) fn pointers<'a>(&'a self, own: &'a [EnvEntry]) -> PointerArray<'a> {
        let mut strings: Vec<&CStr> = self.entries.iter().map(EnvEntry::text).collect();
        let mut new: Vec<&EnvEntry> = Vec::new();
        for entry in own
            .iter()
            .filter(|entry| entry.key() != TOKEN_VARIABLE.as_bytes())
        {
            if let Some(&at) = self.index.get(entry.key()) {
                strings[at] = entry.text();
            } else if let Some(known) = new.iter_mut().find(|known| known.key() == entry.key()) {
                *known = entry;
            } else {
                new.push(entry);
            }
        }
        PointerArray::new(strings.into_iter().chain(new.into_iter().map(EnvEntry::text)))
    }

    /// What a worker finds under this name.
    pub(super) fn value<'a>(&'a self, own: &'a [EnvEntry], key: &[u8]) -> Option<&'a [u8]> {
        let own = own.iter().rev().find(|entry| entry.key() == key);
        own.or_else(|| self.index.get(key).map(|&at| &self.entries[at]))
            .map(EnvEntry::value)
    }
}

#[cfg(test)]
mod tests;
