//! Types of option values that have their own spelling, the same on the command line and in a config file.

mod adapter;
mod combine;
mod data;
mod device;
mod export;
mod memory;
mod run;
mod weights;

pub use adapter::{LayerList, Pattern, PrefixInit, PromptInit, ScaledAdapter};
pub use combine::{CombineName, MajorityName};
pub use data::FormatName;
pub use device::{BaseDtypeName, DeviceName, Precision};
pub use export::{ExportName, GgufTypeName};
pub use memory::{MemoryName, RecomputeName, RowsName, Switch};
pub use run::{Optimizer, ScheduleName, SplitName, TokenIds, Warmup};
pub use weights::{ShardSize, WeightDtypeName};
