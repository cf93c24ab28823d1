"""Conversations: one, several, one that goes on, and one with a template of its own."""

import argparse

from vllm import LLM

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}{{ ending }}"


def show(outputs) -> None:
    for output in outputs:
        print(f"Prompt: {output.prompt!r}\nAnswer: {output.outputs[0].text!r}\n" + "-" * 20)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    args = parser.parse_args()

    llm = LLM(model=args.model, dtype="float32", max_model_len=512, generation_config="vllm")
    sampling_params = llm.get_default_sampling_params()
    sampling_params.temperature = 0.0
    sampling_params.max_tokens = 12

    conversation = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": [{"type": "text", "text": "Write about a small town."}]},
    ]
    show(llm.chat(conversation, sampling_params, use_tqdm=False))
    show(llm.chat([conversation, conversation[1:2]], sampling_params, use_tqdm=True))
    show(
        llm.chat(
            [*conversation, {"role": "assistant", "content": "The town"}],
            sampling_params,
            add_generation_prompt=False,
            continue_final_message=True,
        )
    )
    show(
        llm.chat(
            conversation[1:2],
            sampling_params,
            chat_template=TEMPLATE,
            chat_template_kwargs={"ending": "and then"},
            chat_template_content_format="string",
        )
    )


if __name__ == "__main__":
    main()
