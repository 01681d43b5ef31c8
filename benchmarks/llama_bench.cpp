// Times llama.cpp through its C interface on a GGUF file; prints a JSON line like examples/decoding.rs.
//
//     llama_bench MODEL.gguf --backends FOLDER [--cpu NAME] [--threads N] [--prompt N,..] [--rows N,..]
//         [--new N]
//
// It makes the calls that llama.cpp's own benchmarks make, with their defaults: for prompts `llama-bench -p N`,
// for one sample `llama-bench -n NEW -d 32`, for more `llama-batched-bench -pps -npp 32 -ntg NEW -npl ROWS`.
// Speeds are tokens/s. FOLDER holds the libggml-cpu-*.so files, of which llama.cpp picks the one for the CPU;
// `--cpu haswell` loads libggml-cpu-haswell.so instead, the AVX2 build. "backend" in the JSON line names the
// file. benchmarks/compare_generation.py compiles this program.

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llama.h"

// llama-bench's default number of threads, from libllama-common: CPUs without their second hardware threads.
int32_t common_cpu_get_num_math();

namespace {

// Tokens before those whose making is timed.
const int PROMPT = 32;
// llama-bench's repetitions. A pass over `--new` tokens is long in itself: three of them.
const int PROMPT_RUNS = 5;
const int GENERATION_RUNS = 3;
// llama-bench's -b and -ub.
const int BATCH = 2048;
const int MICRO_BATCH = 512;

[[noreturn]] void fail(int code, const std::string &message) {
    std::fprintf(stderr, "llama_bench: %s\n", message.c_str());
    std::exit(code);
}

struct Options {
    std::string model, backends, cpu;
    std::vector<int> prompts = {512}, rows = {1};
    int generated = 128;
    int threads = common_cpu_get_num_math();
};

// Whole numbers from 1 between commas.
std::vector<int> numbers(const std::string &name, const char *text) {
    std::vector<int> found;
    for (const char *at = text; ; ++at) {
        char *end = nullptr;
        const long number = std::strtol(at, &end, 10);
        if (end == at || number < 1 || number > 1000000 || (*end != ',' && *end != '\0'))
            fail(2, name + " " + text + ": give whole numbers from 1 with commas between them");
        found.push_back(static_cast<int>(number));
        if (*end == '\0')
            return found;
        at = end;
    }
}

Options parse(int count, char **words) {
    Options options;
    if (count < 2)
        fail(2, "usage: llama_bench MODEL.gguf --backends FOLDER [..]");
    options.model = words[1];
    for (int at = 2; at < count; at += 2) {
        const std::string name = words[at];
        if (at + 1 == count)
            fail(2, name + ": give a value");
        const char *value = words[at + 1];
        if (name == "--backends")
            options.backends = value;
        else if (name == "--cpu")
            options.cpu = value;
        else if (name == "--threads")
            options.threads = numbers(name, value).front();
        else if (name == "--prompt")
            options.prompts = numbers(name, value);
        else if (name == "--rows")
            options.rows = numbers(name, value);
        else if (name == "--new")
            options.generated = numbers(name, value).front();
        else
            fail(2, name + ": no such option");
    }
    if (options.backends.empty())
        fail(2, "--backends is missing: give the folder with the libggml-cpu-*.so files");
    return options;
}

void log_errors(ggml_log_level level, const char *text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR)
        std::fputs(text, stderr);
}

// The CPU backend: its thread pools, and the file that it was loaded from.
struct Backend {
    decltype(&ggml_threadpool_new) new_pool;
    decltype(&ggml_threadpool_free) free_pool;
    std::string file;
};

Backend load_backend(const Options &options) {
    if (options.cpu.empty()) {
        ggml_backend_load_all_from_path(options.backends.c_str());
    } else {
        const std::string file = options.backends + "/libggml-cpu-" + options.cpu + ".so";
        if (!ggml_backend_load(file.c_str()))
            fail(1, file + " cannot be loaded");
    }
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!device)
        fail(1, "no CPU backend in " + options.backends);
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
    void *new_pool = ggml_backend_reg_get_proc_address(registry, "ggml_threadpool_new");
    void *free_pool = ggml_backend_reg_get_proc_address(registry, "ggml_threadpool_free");
    Dl_info library;
    if (!new_pool || !free_pool || !dladdr(new_pool, &library))
        fail(1, "the CPU backend has no thread pools");
    const char *name = std::strrchr(library.dli_fname, '/');
    return {reinterpret_cast<decltype(&ggml_threadpool_new)>(new_pool),
            reinterpret_cast<decltype(&ggml_threadpool_free)>(free_pool),
            name ? name + 1 : library.dli_fname};
}

// A context with threads of its own, as llama-bench makes one for each of its tests.
class Context {
public:
    Context(llama_model *model, const Backend &backend, int threads, int rows, int length)
        : backend(backend) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = rows * length;
        params.n_seq_max = rows;
        params.n_batch = BATCH;
        params.n_ubatch = MICRO_BATCH;
        context = llama_init_from_model(model, params);
        if (!context)
            fail(1, "llama.cpp makes no context of " + std::to_string(rows * length) + " tokens");
        ggml_threadpool_params pool_params = ggml_threadpool_params_default(threads);
        pool = backend.new_pool(&pool_params);
        if (!pool)
            fail(1, "no " + std::to_string(threads) + " threads");
        llama_attach_threadpool(context, pool, nullptr);
        llama_set_n_threads(context, threads, threads);
        vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    }

    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;

    ~Context() {
        llama_free(context);
        backend.free_pool(pool);
    }

    void clear() { llama_memory_clear(llama_get_memory(context), false); }

    // Reads `count` tokens into an empty sequence 0, at most BATCH in a call; logits of the last one.
    void read(int count) {
        std::vector<llama_token> tokens(count);
        for (llama_token &token : tokens)
            token = random_token();
        for (int at = 0; at < count; at += BATCH)
            decode(llama_batch_get_one(tokens.data() + at, std::min(BATCH, count - at)));
        llama_synchronize(context);
    }

    // Makes `rows` sequences of sequence 0, which holds `length` tokens.
    void fork(int rows, int length) {
        if (rows == 1)
            return;
        llama_memory_t memory = llama_get_memory(context);
        for (int row = 1; row < rows; ++row)
            llama_memory_seq_cp(memory, 0, row, -1, -1);
        // The next call makes the copies. As in llama-batched-bench that is a token which is dropped again.
        step(1, length);
        llama_memory_seq_rm(memory, 0, length, -1);
    }

    // A token for each of `rows` sequences at `position`, with logits of all.
    void step(int rows, int position) {
        llama_batch batch = llama_batch_init(rows, 0, 1);
        batch.n_tokens = rows;
        for (int row = 0; row < rows; ++row) {
            batch.token[row] = random_token();
            batch.pos[row] = position;
            batch.n_seq_id[row] = 1;
            batch.seq_id[row][0] = row;
            batch.logits[row] = true;
        }
        decode(batch);
        llama_synchronize(context);
        llama_batch_free(batch);
    }

private:
    llama_token random_token() const { return std::rand() % vocab; }

    void decode(llama_batch batch) {
        const int code = llama_decode(context, batch);
        if (code != 0)
            fail(1, "llama_decode returned " + std::to_string(code));
    }

    const Backend &backend;
    llama_context *context = nullptr;
    ggml_threadpool *pool = nullptr;
    int vocab = 0;
};

double seconds(const std::function<void()> &work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// Tokens/s of reading a prompt, the median of runs after one that warms up.
double prompt_speed(Context &context, int length) {
    std::vector<double> taken;
    for (int run = 0; run <= PROMPT_RUNS; ++run) {
        context.clear();
        const double time = seconds([&] { context.read(length); });
        if (run > 0)
            taken.push_back(time);
    }
    return length / median(taken);
}

// Tokens/s of all samples together after one prompt, the median of runs after a token that warms up.
double generation_speed(Context &context, int rows, int generated) {
    std::vector<double> taken;
    for (int run = 0; run <= GENERATION_RUNS; ++run) {
        context.clear();
        context.read(PROMPT);
        context.fork(rows, PROMPT);
        const int steps = run == 0 ? 1 : generated;
        const double time = seconds([&] {
            for (int at = 0; at < steps; ++at)
                context.step(rows, PROMPT + at);
        });
        if (run > 0)
            taken.push_back(time);
    }
    return rows * generated / median(taken);
}

}  // namespace

int main(int count, char **words) {
    const Options options = parse(count, words);
    llama_log_set(log_errors, nullptr);
    const Backend backend = load_backend(options);
    llama_backend_init();
    llama_numa_init(GGML_NUMA_STRATEGY_DISABLED);
    std::unique_ptr<llama_model, decltype(&llama_model_free)> model(
        llama_model_load_from_file(options.model.c_str(), llama_model_default_params()), llama_model_free);
    if (!model)
        fail(1, options.model + " cannot be loaded");

    std::printf("{");
    for (int prompt : options.prompts) {
        Context context(model.get(), backend, options.threads, 1, prompt);
        std::printf("\"prompt %d\": %.1f, ", prompt, prompt_speed(context, prompt));
    }
    for (int rows : options.rows) {
        Context context(model.get(), backend, options.threads, rows, PROMPT + options.generated);
        std::printf("\"rows %d\": %.1f, ", rows, generation_speed(context, rows, options.generated));
    }
    std::printf("\"threads\": %d, \"backend\": \"%s\"}\n", options.threads, backend.file.c_str());
}
