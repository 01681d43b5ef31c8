//! The embedding on the device against the CPU side: rows of both tables, deltas, virtual tokens.

use engraft::{
    device::{Buffer, DType::F32},
    error::Result,
    kernels::{
        adapted_linear::Vector,
        embed::{self, DeltaGradients, EmbeddingDelta, Tables, Tokens},
    },
};

use crate::{inputs::On, ops::Outputs};

pub fn tables(on: On) -> Result<Outputs> {
    let (n, c, vocab, positions) = (29, 23, 61, 40);
    let ids: Vec<u32> = (0..n).map(|i| i * 17 % vocab).collect();
    let places: Vec<u32> = (0..n).map(|i| i * 7 % positions).collect();
    let (ids, places) = (Buffer::on(on.device, &ids)?, Buffer::on(on.device, &places)?);
    let (wte, wpe) = (on.weight(1, vocab as usize, c)?, on.frozen(2, positions as usize * c)?);
    let mut x = on.room(n as usize * c)?;
    let tables = Tables { wte: wte.view(), wpe: wpe.view(), prompt: None };
    embed::forward(ids.view(), places.view(), tables, x.view_mut());
    Ok(vec![("x", x.view().to_floats())])
}

/// Rows of a prompt between rows of the table.
pub fn virtual_tokens(on: On) -> Result<Outputs> {
    let (n, c, vocab, length) = (301, 75, 40, 5);
    let ids: Vec<u32> = (0..n as u32).map(|i| i * i % (vocab + length) as u32).collect();
    let places: Vec<u32> = (0..n as u32).map(|i| i % 50).collect();
    let order = Buffer::on(on.device, &embed::by_id(&ids))?;
    let (ids, places) = (Buffer::on(on.device, &ids)?, Buffer::on(on.device, &places)?);
    let (wte, wpe) = (on.weight(1, vocab, c)?, on.frozen(2, 50 * c)?);
    let (prompt, mut d_prompt) = (on.wide(3, length * c)?, on.wide(4, length * c)?);
    let (mut x, dx) = (on.room(n * c)?, on.activations(5, n * c)?);
    let tables = Tables { wte: wte.view(), wpe: wpe.view(), prompt: Some(prompt.view()) };
    embed::forward(ids.view(), places.view(), tables, x.view_mut());
    let tokens = Tokens { ids: ids.view(), vocab };
    embed::prompt_backward(tokens, order.view(), dx.view(), d_prompt.view_mut());
    Ok(vec![("x", x.view().to_floats()), ("d prompt", d_prompt.view().to_vec())])
}

/// Ids that occur often, and some without a row of the table.
pub fn deltas(on: On) -> Result<Outputs> {
    let (n, c, vocab, rank) = (301, 72, 40, 11);
    let ids: Vec<u32> = (0..n as u32).map(|i| if i % 3 == 0 { 7 } else { i * i % 43 }).collect();
    let order = Buffer::on(on.device, &embed::by_id(&ids))?;
    let ids = Buffer::on(on.device, &ids)?;
    let (a, b) = (Vector::trained(1), Vector::trained(2 + rank * vocab));
    let delta = EmbeddingDelta { a, b, rank, scale: 1.7 };
    let len = b.at + c * rank;
    let (values, mut grads) = (on.wide(1, len)?, on.wide(2, len)?);
    let (mut x, dx) = (on.activations(3, n * c)?, on.activations(4, n * c)?);
    let mut d_xa = on.zeros(F32, n * rank)?;
    let tokens = Tokens { ids: ids.view(), vocab };
    embed::add_delta(&delta, tokens, values.view(), x.view_mut());
    let to = DeltaGradients { grads: grads.view_mut(), d_xa: d_xa.view_mut() };
    embed::delta_backward(&delta, tokens, order.view(), values.view(), dx.view(), to);
    Ok(vec![("x", x.view().to_floats()), ("gradients of A and B", grads.view().to_vec())])
}
