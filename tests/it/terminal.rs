//! The program on a terminal: a small emulator shows what its user sees.
#![cfg(target_os = "linux")]

use std::{
    fs::File,
    io::Read,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

use crate::cli_support::{SMALL, Sandbox};

/// Longer than anything here takes on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// A window of a terminal with the program in it.
struct Window {
    child: Child,
    output: Receiver<Vec<u8>>,
    screen: Screen,
    master: File,
}

impl Window {
    /// Starts `command` in a window of so many columns.
    fn open(mut command: Command, columns: u16, term: Option<&str>) -> Self {
        let size = libc::winsize { ws_row: 40, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let (mut master, mut slave) = (0, 0);
        // SAFETY: both numbers are written before they are read, and nobody else owns what they name.
        let (master, slave) = unsafe {
            let opened =
                libc::openpty(&mut master, &mut slave, std::ptr::null_mut(), std::ptr::null(), &size);
            assert_eq!(opened, 0, "{}", std::io::Error::last_os_error());
            (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave))
        };
        match term {
            Some(term) => command.env("TERM", term),
            None => command.env_remove("TERM"),
        };
        let both = |slave: &OwnedFd| Stdio::from(slave.try_clone().unwrap());
        let child = command.stdout(both(&slave)).stderr(both(&slave)).spawn().unwrap();
        // The command has copies of the other end, which would keep it open.
        drop((command, slave));
        let (send, output) = channel();
        let mut reader = master.try_clone().unwrap();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            // Ends with an error when the program has ended.
            while let Ok(read @ 1..) = reader.read(&mut buffer) {
                let _ = send.send(buffer[..read].to_vec());
            }
        });
        Self { child, output, screen: Screen::new(usize::from(columns)), master }
    }

    /// Changes the width of the window, as a user does with the mouse.
    fn resize(&mut self, columns: u16) {
        let size = libc::winsize { ws_row: 40, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: the call reads one `winsize`.
        assert_eq!(unsafe { libc::ioctl(self.master.as_raw_fd(), libc::TIOCSWINSZ, &size) }, 0);
        self.screen.resize(usize::from(columns));
    }

    /// Takes up what is printed until the text is somewhere on the screen.
    #[track_caller]
    fn wait_for(&mut self, text: &str) {
        let begun = Instant::now();
        while !self.screen.text().contains(text) {
            assert!(begun.elapsed() < LONG, "no {text:?} in:\n{}", self.screen.text());
            if let Ok(bytes) = self.output.recv_timeout(Duration::from_millis(100)) {
                self.screen.take(&bytes);
            }
        }
    }

    /// Takes up all that is printed within `time`.
    fn watch(&mut self, time: Duration) {
        let begun = Instant::now();
        while let Some(left) = time.checked_sub(begun.elapsed()) {
            if let Ok(bytes) = self.output.recv_timeout(left) {
                self.screen.take(&bytes);
            }
        }
    }

    fn signal(&self) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    }

    /// Waits for the end of the program; its exit code, and the screen then.
    fn end(mut self) -> (Option<i32>, Screen) {
        while let Ok(bytes) = self.output.recv_timeout(LONG) {
            self.screen.take(&bytes);
        }
        (self.child.wait().unwrap().code(), self.screen)
    }
}

/// Lines of text, wrapped at the width of the window; the cursor is on a row of the last one.
///
/// As in terminals of today a line that was wrapped is joined again when the window grows.
struct Screen {
    columns: usize,
    /// Lines as they were written, whatever the width.
    lines: Vec<Vec<char>>,
    /// Line and column of the cursor in `lines`.
    cursor: (usize, usize),
    /// How often the cursor went up a row.
    climbs: usize,
    rest: Vec<u8>,
}

impl Screen {
    fn new(columns: usize) -> Self {
        Self { columns, lines: vec![Vec::new()], cursor: (0, 0), climbs: 0, rest: Vec::new() }
    }

    fn resize(&mut self, columns: usize) {
        self.columns = columns;
    }

    fn text(&self) -> String {
        self.lines.iter().map(|line| line.iter().collect::<String>().trim_end().to_owned() + "\n").collect()
    }

    fn take(&mut self, bytes: &[u8]) {
        self.rest.extend(bytes);
        let valid = match std::str::from_utf8(&self.rest) {
            Ok(text) => text.len(),
            Err(error) => error.valid_up_to(),
        };
        let text = String::from_utf8(self.rest.drain(..valid).collect()).unwrap();
        let mut chars = text.chars().peekable();
        while let Some(next) = chars.next() {
            match next {
                '\r' => self.cursor.1 -= self.cursor.1 % self.columns,
                '\n' => self.feed(),
                '\u{1b}' => {
                    // ESC [ numbers letter. One that is cut in two would show as text.
                    assert_eq!(chars.next(), Some('['), "only sequences of this kind are known");
                    let mut number = String::new();
                    while let Some(digit) = chars.next_if(|c| c.is_ascii_digit() || ";?".contains(*c)) {
                        number.push(digit);
                    }
                    self.control(chars.next().unwrap(), number.parse().unwrap_or(1));
                }
                other => self.put(other),
            }
        }
    }

    /// A line break: from the last line to a new one.
    fn feed(&mut self) {
        self.cursor.0 += 1;
        if self.cursor.0 == self.lines.len() {
            self.lines.push(Vec::new());
        }
        self.cursor.1 = 0;
    }

    fn put(&mut self, one: char) {
        let (line, column) = self.cursor;
        let line = &mut self.lines[line];
        if line.len() <= column {
            line.resize(column + 1, ' ');
        }
        line[column] = one;
        self.cursor.1 += 1;
    }

    fn control(&mut self, letter: char, number: usize) {
        match letter {
            // Clears the row of the cursor, not the whole line.
            'K' => {
                let row = self.cursor.1.saturating_sub(usize::from(self.is_at_edge())) / self.columns;
                let (start, end) = (row * self.columns, (row + 1) * self.columns);
                let line = &mut self.lines[self.cursor.0];
                let end = end.min(line.len());
                if start < end {
                    line[start..end].fill(' ');
                }
                while line.last() == Some(&' ') {
                    line.pop();
                }
            }
            'A' => (0..number).for_each(|_| self.climb()),
            'B' => (0..number).for_each(|_| self.feed()),
            // Colours, and a cursor that is hidden or shown.
            'm' | 'h' | 'l' => {}
            other => panic!("unknown sequence {number}{other}"),
        }
    }

    fn is_at_edge(&self) -> bool {
        self.cursor.1 > 0 && self.cursor.1.is_multiple_of(self.columns)
    }

    fn climb(&mut self) {
        self.climbs += 1;
        let (line, column) = self.cursor;
        self.cursor = match column.checked_sub(self.columns) {
            Some(column) => (line, column),
            None => (line.saturating_sub(1), column),
        };
    }
}

/// A run of many short steps with an evaluation now and then.
fn long_run(sandbox: &Sandbox) -> Command {
    let line =
        format!("{SMALL} --json=false --output run --steps 100000 --eval-data data.jsonl --eval-every 40");
    sandbox.command(&line)
}

#[test]
fn no_width_of_the_window_costs_a_result() {
    let sandbox = Sandbox::new();
    let mut window = Window::open(long_run(&sandbox), 100, Some("xterm"));
    let result = |step: usize| format!("step {step}: evaluation loss ");
    window.wait_for(&result(40));
    // As users do it: narrow, so that the bar has no room, and wide again.
    for (number, columns) in [24, 100, 12, 60, 200].into_iter().enumerate() {
        window.resize(columns);
        window.watch(Duration::from_millis(600));
        window.wait_for(&result(80 + 40 * number));
    }
    window.signal();
    let (code, screen) = window.end();
    let text = screen.text();
    assert_eq!(code, Some(130), "{text}");
    for step in (0..=240).step_by(40) {
        let line = text.lines().find(|line| line.contains(&result(step)));
        let line = line.unwrap_or_else(|| panic!("the result of step {step} is gone:\n{text}"));
        assert!(line.ends_with("tokens"), "a result is torn: {line:?}\n{text}");
    }
    assert_eq!(screen.climbs, 0, "a bar in one row never needs to go up");
}

#[test]
fn the_answer_to_a_signal_does_not_tear_the_bar() {
    let sandbox = Sandbox::new();
    let mut window = Window::open(long_run(&sandbox), 80, Some("xterm"));
    window.wait_for("step 40: evaluation loss");
    window.signal();
    let (code, screen) = window.end();
    let text = screen.text();
    assert_eq!(code, Some(130), "{text}");
    let lines: Vec<&str> = text.lines().collect();
    let answer = "finishing this step, then saving; Ctrl-C again stops without saving";
    assert_eq!(lines.iter().filter(|line| **line == answer).count(), 1, "{text}");
    assert!(lines.contains(&"hint: engraft train --resume --output run"), "{text}");
    assert!(!text.contains("/100000"), "the bar is gone at the end:\n{text}");
}

/// The emulator is a test's tool, so it is tested itself: a bar of several rows does erase a result.
#[test]
fn the_emulator_shows_what_a_bar_of_two_rows_does() {
    let mut screen = Screen::new(20);
    screen.take(b"a result\r\n");
    let bar = "[=====>    ] 3/9 loss 1.2345";
    screen.take(bar.as_bytes());
    screen.resize(80);
    assert_eq!(screen.text(), format!("a result\n{bar}\n"));
    // It had two rows, now it has one.
    screen.take(b"\x1b[1A\r\x1b[2K\x1b[1B\r\x1b[2K\x1b[1A");
    assert!(!screen.text().contains("result"), "{:?}", screen.text());
    let mut screen = Screen::new(20);
    screen.take(b"a result\r\nbar\r\x1b[2Kanother\r\nbar");
    assert_eq!((screen.text().as_str(), screen.climbs), ("a result\nanother\nbar\n", 0));
}

#[test]
fn a_terminal_that_cannot_draw_gets_lines() {
    for term in [Some("dumb"), None] {
        let sandbox = Sandbox::new();
        let line = format!("{SMALL} --json=false --output run --steps 4 --log-every 2");
        let (code, screen) = Window::open(sandbox.command(&line), 80, term).end();
        let text = screen.text();
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains("step 2/4  loss") && text.contains("step 4/4  loss"), "{term:?}: {text}");
    }
}
