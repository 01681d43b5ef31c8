// Writes the logits that llama.cpp computes through its C interface, with or without a LoRA, and what it generates.
//
//     llama_logits MODEL.gguf --backends FOLDER --ids FILE --out FILE [--lora ADAPTER.gguf] [--new N] [--threads N]
//
// Each line of --ids is a text: token ids with spaces between them, read from position 0. --out gets the logits of every
// token of every text as F32, one after another. On stdout is a JSON object with the N most likely next tokens of each
// text, one after another. Keys and values are kept in F32. benchmarks/check_gguf.py compiles this program.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

namespace {

[[noreturn]] void fail(int code, const std::string &message) {
    std::fprintf(stderr, "llama_logits: %s\n", message.c_str());
    std::exit(code);
}

struct Options {
    std::string model, backends, ids, out, lora;
    int generated = 0;
    int threads = 2;
};

Options parse(int count, char **words) {
    Options options;
    if (count < 2)
        fail(2, "usage: llama_logits MODEL.gguf --backends FOLDER --ids FILE --out FILE [..]");
    options.model = words[1];
    for (int at = 2; at + 1 < count; at += 2) {
        const std::string name = words[at], value = words[at + 1];
        if (name == "--backends")
            options.backends = value;
        else if (name == "--ids")
            options.ids = value;
        else if (name == "--out")
            options.out = value;
        else if (name == "--lora")
            options.lora = value;
        else if (name == "--new")
            options.generated = std::atoi(value.c_str());
        else if (name == "--threads")
            options.threads = std::max(1, std::atoi(value.c_str()));
        else
            fail(2, name + ": no such option");
    }
    if (options.backends.empty() || options.ids.empty() || options.out.empty())
        fail(2, "give --backends, --ids and --out");
    return options;
}

std::vector<std::vector<llama_token>> texts(const std::string &path) {
    std::ifstream file(path);
    std::vector<std::vector<llama_token>> found;
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::vector<llama_token> ids;
        for (llama_token id; words >> id;)
            ids.push_back(id);
        if (!ids.empty())
            found.push_back(ids);
    }
    if (found.empty())
        fail(2, path + ": holds no ids");
    return found;
}

void log_errors(ggml_log_level level, const char *text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR)
        std::fputs(text, stderr);
}

// Reads `ids` from `position` on, with the logits of all of them.
void decode(llama_context *context, const std::vector<llama_token> &ids, int position) {
    llama_batch batch = llama_batch_init(static_cast<int>(ids.size()), 0, 1);
    batch.n_tokens = static_cast<int>(ids.size());
    for (int at = 0; at < batch.n_tokens; ++at) {
        batch.token[at] = ids[at];
        batch.pos[at] = position + at;
        batch.n_seq_id[at] = 1;
        batch.seq_id[at][0] = 0;
        batch.logits[at] = true;
    }
    const int code = llama_decode(context, batch);
    llama_batch_free(batch);
    if (code != 0)
        fail(1, "llama_decode returned " + std::to_string(code));
}

}  // namespace

int main(int count, char **words) {
    const Options options = parse(count, words);
    llama_log_set(log_errors, nullptr);
    ggml_backend_load_all_from_path(options.backends.c_str());
    llama_backend_init();
    llama_model *model = llama_model_load_from_file(options.model.c_str(), llama_model_default_params());
    if (!model)
        fail(1, options.model + " cannot be loaded");
    const auto rows = texts(options.ids);
    size_t longest = 0;
    for (const auto &row : rows)
        longest = std::max(longest, row.size());
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<uint32_t>(longest + options.generated);
    params.n_batch = params.n_ubatch = params.n_ctx;
    params.n_threads = params.n_threads_batch = options.threads;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context *context = llama_init_from_model(model, params);
    if (!context)
        fail(1, "no context of " + std::to_string(params.n_ctx) + " tokens");
    if (!options.lora.empty()) {
        llama_adapter_lora *adapter = llama_adapter_lora_init(model, options.lora.c_str());
        if (!adapter)
            fail(1, options.lora + " cannot be loaded");
        float scale = 1;
        if (llama_set_adapters_lora(context, &adapter, 1, &scale) != 0)
            fail(1, options.lora + " cannot be used");
    }
    const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::ofstream out(options.out, std::ios::binary);
    std::printf("{\"vocab\": %d, \"tokens\": [", vocab);
    for (size_t row = 0; row < rows.size(); ++row) {
        llama_memory_clear(llama_get_memory(context), true);
        decode(context, rows[row], 0);
        const int length = static_cast<int>(rows[row].size());
        for (int at = 0; at < length; ++at)
            out.write(reinterpret_cast<const char *>(llama_get_logits_ith(context, at)), sizeof(float) * vocab);
        std::printf("%s[", row ? ", " : "");
        for (int made = 0; made < options.generated; ++made) {
            const float *logits = llama_get_logits_ith(context, -1);
            const llama_token next = static_cast<llama_token>(std::max_element(logits, logits + vocab) - logits);
            std::printf("%s%d", made ? ", " : "", next);
            if (made + 1 < options.generated)
                decode(context, {next}, length + made);
        }
        std::printf("]");
    }
    std::printf("]}\n");
    if (!out.flush())
        fail(1, options.out + " cannot be written");
}
