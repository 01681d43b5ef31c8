//! `engraft-infer chat`: a conversation in the template of training.

use std::{
    io::{self, BufRead, IsTerminal, Write},
    path::{Path, PathBuf},
};

use engraft_util::atomic;
use serde_json::json;

use super::{generate::Ready, prompts::from_turns, sampling::SamplingArgs};
use crate::{
    cli::common::{
        args::{BaseArgs, ComputeArgs},
        options::{Options, options, value},
        output::{count_of, write_detail, write_error, write_note, write_out},
        signals,
        values::ScaledAdapter,
    },
    data::{self, Turn, template::ASSISTANT},
    error::{Error, Result},
    generate::{Finish, GenerateOptions, Session},
};

options! {
    /// Options of `chat`.
    ChatArgs { base: BaseArgs, compute: ComputeArgs, sampling: SamplingArgs }

    "" {
        /// Run folder, adapter folder or hub id, optionally with =SCALE; repeatable, LoRAs are summed
        adapter: Vec<ScaledAdapter> => value("DIR[=SCALE]").basic();
        /// What the conversation begins with, as its system turn
        system: String => value("TEXT").basic();
        /// Go on with the conversation in this file, as /save writes it
        #[arg(conflicts_with = "system")]
        messages: PathBuf => value("FILE").basic();
    }
}

/// Most new tokens of an answer if the user names no number.
const MOST: usize = 256;

const HELP: &str = "\
/reset       begin anew
/save FILE   write the conversation as a record of training data
/help        this list
/exit        end; so does Ctrl-D
A line that ends with \\ goes on in the next one; lines between two lines of \"\"\" are one message.";

/// Runs `engraft-infer chat`.
///
/// # Errors
/// When an option is invalid, or a base, adapter or file cannot be read or does not fit the others.
pub fn run(args: &ChatArgs) -> Result<()> {
    signals::install()?;
    args.check()?;
    let options = args.sampling.generate_options(MOST)?;
    let begun = begin(args)?;
    let ready = Ready::open(args.adapter.as_deref().unwrap_or_default(), &args.base, &args.compute)?;
    let generator = ready.generator()?;
    // Before anything is typed: without a tokenizer nothing can be said.
    from_turns(&[Turn::new("user", "")], &ready.opened)?;
    let room = generator.room();
    let mut chat = Chat {
        ready: &ready,
        session: Session::new(&generator)?,
        options,
        room,
        turns: begun.clone(),
        saved: None,
    };
    let is_terminal = io::stdin().is_terminal();
    if is_terminal {
        write_note("type a message; /help lists the commands, Ctrl-D ends");
    }
    let mut lines = io::stdin().lock().lines();
    while let Some(message) = next_message(&mut lines, is_terminal)? {
        match message.trim() {
            "" => {}
            "/exit" | "/quit" => break,
            "/help" => write_error(HELP),
            "/reset" => {
                chat.turns.clone_from(&begun);
                write_note("the conversation begins anew");
            }
            command if command.starts_with('/') => chat.command(command),
            _ => chat.say(&message)?,
        }
    }
    if is_terminal {
        // After Ctrl-D the shell's prompt begins a line.
        write_error("");
    }
    Ok(())
}

/// The turns that a conversation begins with.
fn begin(args: &ChatArgs) -> Result<Vec<Turn>> {
    if let Some(path) = &args.messages {
        let text = std::fs::read_to_string(path).map_err(|cause| Error::reading(path, &cause))?;
        return data::turns(&text, &path.display().to_string());
    }
    Ok(args.system.iter().map(|text| Turn::new("system", text)).collect())
}

struct Chat<'r, 'g, 'a> {
    ready: &'r Ready,
    session: Session<'g, 'a>,
    options: GenerateOptions,
    /// Tokens that the base has room for.
    room: usize,
    turns: Vec<Turn>,
    /// The file that this conversation was written to.
    saved: Option<PathBuf>,
}

impl Chat<'_, '_, '_> {
    /// Answers `message`, and remembers both.
    fn say(&mut self, message: &str) -> Result<()> {
        self.turns.push(Turn::new("user", message));
        let Some(prompt) = self.fitting()? else {
            self.turns.pop();
            write_error(&format!(
                "error: the message has no room in the base's {}; shorten it, or /reset",
                count_of(self.room, "token")
            ));
            return Ok(());
        };
        let answer = self.session.answer(&prompt, &self.options, &mut |piece| write_out(piece))?;
        write_detail(&format!(
            "{} of {} were in the cache; {:.1} tokens/s",
            answer.reused,
            count_of(prompt.len(), "token"),
            answer.sample.tokens_per_s
        ));
        if answer.sample.finish == Finish::Length {
            let most = count_of(answer.sample.token_ids.len(), "token");
            write_note(&format!("hint: the answer was cut after {most}; --max-new-tokens N allows more"));
        }
        self.options.seed = self.options.seed.wrapping_add(1);
        self.turns.push(Turn::new(ASSISTANT, &answer.sample.text.unwrap_or_default()));
        Ok(())
    }

    /// The prompt of the conversation. Where there is no room for it and an answer, its oldest questions and
    /// answers are forgotten; `None` if that is not enough.
    fn fitting(&mut self) -> Result<Option<Vec<u32>>> {
        let mut forgotten = 0;
        loop {
            let prompt = from_turns(&self.turns, &self.ready.opened)?;
            // At least an eighth of the room is for the answer.
            if prompt.len() + self.options.max_new_tokens.min(self.room / 8).max(1) <= self.room {
                if forgotten > 0 {
                    write_note(&format!("hint: the oldest {} no longer fit", count_of(forgotten, "turn")));
                }
                return Ok(Some(prompt));
            }
            let Some(oldest) = self.turns.iter().position(|turn| turn.role != "system") else {
                return Ok(None);
            };
            if oldest + 1 == self.turns.len() {
                return Ok(None);
            }
            self.turns.remove(oldest);
            forgotten += 1;
        }
    }

    /// Runs a command; what is wrong with it is said, and the conversation goes on.
    fn command(&mut self, command: &str) {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let done = match (name, rest.trim()) {
            ("/save", "") => Err(Error::input("/save: needs a file; write /save FILE")),
            ("/save", file) => self.save(Path::new(file)),
            _ => Err(Error::input(format!("{name}: there is no such command; /help lists all"))),
        };
        if let Err(error) = done {
            write_error(&format!("error: {error}"));
        }
    }

    fn save(&mut self, path: &Path) -> Result<()> {
        if path.exists() && self.saved.as_deref() != Some(path) {
            return Err(Error::input(format!("/save {}: exists; give another name", path.display())));
        }
        let record = json!({ "messages": self.turns });
        atomic::write(path, format!("{record}\n").as_bytes())?;
        self.saved = Some(path.to_owned());
        write_note(&format!("wrote {} to {}", count_of(self.turns.len(), "turn"), path.display()));
        Ok(())
    }
}

/// The next message; `None` at the end of the input.
fn next_message(
    lines: &mut dyn Iterator<Item = io::Result<String>>,
    is_terminal: bool,
) -> Result<Option<String>> {
    const BLOCK: &str = "\"\"\"";
    let mut message: Vec<String> = Vec::new();
    let mut in_block = false;
    loop {
        if is_terminal {
            let _ = write!(io::stderr(), "{}", if message.is_empty() && !in_block { "> " } else { ". " });
        }
        let Some(line) = lines.next() else {
            return Ok((!message.is_empty()).then(|| message.join("\n")));
        };
        let line = line.map_err(|cause| {
            Error::input(format!("standard input: cannot be read: {cause}; send text in UTF-8"))
        })?;
        if line.trim() == BLOCK {
            if in_block {
                return Ok(Some(message.join("\n")));
            }
            in_block = true;
        } else if let (Some(start), false) = (line.strip_suffix('\\'), in_block) {
            message.push(start.to_owned());
        } else {
            message.push(line);
            if !in_block {
                return Ok(Some(message.join("\n")));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_may_have_several_lines() {
        let typed = "one\ntwo\\\nthree\n\"\"\"\nfour\n\nfive\\\n\"\"\"\nsix\\";
        let mut lines = typed.lines().map(|line| Ok(line.to_owned()));
        let mut messages = Vec::new();
        while let Some(message) = next_message(&mut lines, false).unwrap() {
            messages.push(message);
        }
        assert_eq!(messages, ["one", "two\nthree", "four\n\nfive\\", "six"]);
    }
}
