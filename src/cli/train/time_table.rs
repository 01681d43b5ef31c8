//! The predicted time of a step and of a token on GPUs, as a table for people and as JSON.

use serde_json::{Value, json};

use super::table::aligned;
use crate::{
    device::accelerators::Accelerator,
    plan::device_time::{DeviceTime, Op},
};

/// The time of a micro-batch, and of one token of one sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Times {
    /// A training step of one micro-batch.
    pub step: DeviceTime,
    /// One more token of one sample, and the keys that it sees.
    pub token: (DeviceTime, usize),
}

/// Ops by part, then the sums of each GPU.
pub fn whole(times: &Times) -> String {
    let names = Accelerator::ALL.each_ref().map(|gpu| format!("{} us", gpu.name));
    let [first, second, third] = names;
    let words = ["part", "op", "kernel", "launches", "MB", "GFLOP"].map(str::to_owned);
    let [part, op, kernel, launches, bytes, flops] = words;
    let mut lines = vec![[part, op, kernel, launches, bytes, flops, first, second, third]];
    lines.extend(times.step.ops.iter().map(line));
    let mut text = format!(
        "predicted from published peaks; no GPU has measured any of it\n\n{}\n\n",
        aligned(&lines, &[3, 4, 5, 6, 7, 8])
    );
    let (step, (token, keys)) = (&times.step, &times.token);
    let (forward, backward) = step.by_layer;
    text += &format!(
        "step     {} launches; of a layer {forward} forward, {backward} backward\n",
        step.order.len()
    );
    for (gpu, found) in Accelerator::ALL.iter().zip(&step.gpus) {
        text += &format!(
            "         {}: {:.1} ms, {:.0} tokens/s, {:.0}% of {:.0} TFLOP/s, adapters {:.1}%\n",
            gpu.name,
            1e3 * found.seconds,
            found.tokens_per_s,
            100.0 * found.share,
            1e-12 * gpu.ceiling,
            100.0 * found.adapters,
        );
    }
    text += &format!("token    {} launches; one sample, {keys} keys\n", token.order.len());
    for (gpu, found) in Accelerator::ALL.iter().zip(&token.gpus) {
        text += &format!("         {}: {:.0} tokens/s\n", gpu.name, found.tokens_per_s);
    }
    text
}

fn line(op: &Op) -> [String; 9] {
    let [first, second, third] = op.seconds.map(|seconds| format!("{:.0}", 1e6 * seconds));
    [
        op.part.name().to_owned(),
        op.name.clone(),
        op.kernel.clone(),
        op.launches.to_string(),
        format!("{:.1}", 1e-6 * op.bytes),
        format!("{:.2}", 1e-9 * op.flops),
        first,
        second,
        third,
    ]
}

/// The same as JSON.
pub fn event(times: &Times) -> Value {
    let of = |time: &DeviceTime| {
        let gpus = Accelerator::ALL.iter().zip(&time.gpus).map(|(gpu, found)| {
            json!({
                "gpu": gpu.name, "us": 1e6 * found.seconds, "tokens_per_s": found.tokens_per_s,
                "share_of_ceiling": found.share, "adapters": found.adapters,
            })
        });
        json!({
            "launches": time.order.len(),
            "launches_of_a_layer": [time.by_layer.0, time.by_layer.1],
            "gpus": gpus.collect::<Vec<_>>(),
            "order": time.order,
            "ops": time.ops.iter().map(of_op).collect::<Vec<_>>(),
        })
    };
    let (token, keys) = &times.token;
    json!({ "step": of(&times.step), "token": of(token), "token_keys": keys })
}

fn of_op(op: &Op) -> Value {
    json!({
        "part": op.part.name(), "op": op.name, "kernel": op.kernel, "launches": op.launches, "bytes": op.bytes,
        "flops": op.flops, "us": op.seconds.map(|seconds| 1e6 * seconds), "adapter": op.is_adapter,
    })
}
