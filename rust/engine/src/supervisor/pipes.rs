//! Piped streams: the owner gets their bytes as events.

use crate::event::Event;
use crate::supervisor::{Supervisor, Watched};

impl Supervisor {
    /// Stops or resumes reading piped streams. While reading is stopped, workers wait in their writes.
    pub fn set_reading(&mut self, reading: bool) {
        if self.reading == reading {
            return;
        }
        self.reading = reading;
        let Some(job) = &self.job else { return };
        for (index, stream, pipe) in job.pipes() {
            if reading {
                // Fails only when memory is short. Then the rest is read when the group ends.
                let _ = self.poller.watch(pipe, Watched::Pipe(index, stream).encode());
            } else {
                self.poller.forget(pipe);
            }
        }
    }

    /// Reads from a stream, at most a full buffer. Returns the number of bytes.
    pub(super) fn read_pipe(&mut self, worker: usize, stream: usize) -> usize {
        let slot = self.job.as_mut().and_then(|job| job.workers.get_mut(worker));
        let Some(slot) = slot.map(|worker| &mut worker.pipes[stream]) else {
            return 0;
        };
        let Some(pipe) = &*slot else { return 0 };
        let data = match rustix::io::read(pipe, &mut self.buffer[..]) {
            Ok(0) | Err(rustix::io::Errno::IO | rustix::io::Errno::BADF) => {
                self.poller.forget(pipe);
                *slot = None;
                Vec::new()
            }
            Ok(count) => self.buffer[..count].to_vec(),
            Err(_) => return 0,
        };
        let count = data.len();
        self.push_output(worker, stream, data);
        count
    }

    fn push_output(&mut self, worker: usize, stream: usize, data: Vec<u8>) {
        let stream = stream as u8 + 1;
        self.events.push(Event::Output { worker, stream, data });
    }

    /// Reads what a worker's pipes hold now, and closes them. It reads no more than that, because a process outside
    /// the job may hold a pipe and write for ever.
    pub(super) fn close_pipes(&mut self, worker: usize) {
        for stream in 0..2 {
            let mut left = self.bytes_waiting(worker, stream);
            while left > 0 {
                match self.read_pipe(worker, stream) {
                    0 => break,
                    count => left = left.saturating_sub(count),
                }
            }
            let slot = self
                .job
                .as_mut()
                .map(|job| &mut job.workers[worker].pipes[stream]);
            if let Some(pipe) = slot.and_then(Option::take) {
                self.poller.forget(&pipe);
                self.push_output(worker, stream, Vec::new());
            }
        }
    }

    fn bytes_waiting(&self, worker: usize, stream: usize) -> usize {
        let job = self.job.as_ref();
        let pipe = job.and_then(|job| job.workers[worker].pipes[stream].as_ref());
        let count = pipe.and_then(|pipe| rustix::io::ioctl_fionread(pipe).ok());
        count.map_or(0, |count| count as usize)
    }
}
