"""Generation by a server with OpenAI's API: vLLM, SGLang, llama.cpp, a hosted API, our gateway."""
