"""Prompts for the knowledge base of one tenant, and the parsers of the models' responses."""

import re

from querl_sdk import JudgeScore, Message, Prompt, PromptInput, PromptTask, Rejection, Settings, export

# System prompts. `{domain}` is replaced by the setting `domain`.
TEACHER = "你为{domain}知识库改写用户的问题：补全指代，去掉口语，不添加用户没有问的内容。只输出改写后的查询。"
POLICY = "把用户的问题改写成{domain}知识库的检索查询，只输出查询。"
JUDGE = "你评审{domain}知识库的查询改写，按意图是否保留、是否便于检索打 0 到 5 分。输出一行：得分：分数。理由"


class TenantPrompt(Prompt):
    """The prompts with their settings. querl constructs an object for each call."""

    def __init__(self, settings: Settings) -> None:
        """Reads all settings, each with its default. querl refuses a key that is not read here."""
        self.domain = settings.text("domain", "营养保健品")

    def messages(self, task: PromptTask, input: PromptInput) -> list[Message]:
        """The messages of the prompt for one task: at least one, the last from the user, a system message only at the start."""
        systems = {PromptTask.TEACHER_REWRITE: TEACHER, PromptTask.POLICY_REWRITE: POLICY, PromptTask.JUDGE: JUDGE}
        system = Message.system(systems[task].replace("{domain}", self.domain))
        lines = [("用户画像", input.context.user_profile), ("历史", input.context.history_summary), ("问题", input.query)]
        if input.rewrite is not None:
            lines.append(("改写", input.rewrite))
        return [system, Message.user("\n".join(f"{title}：{text}" for title, text in lines if text or title == "问题"))]

    def parse_rewrite(self, text: str) -> str:
        """The rewrite in the response of the teacher or the policy, without the label and quotes around it; not empty."""
        rewrite = re.sub(r"^改写后的查询[:：]", "", text.strip()).strip(" \t\n\"“”「」")
        if not rewrite:
            raise Rejection("no_rewrite", "the response holds no rewrite")
        return rewrite

    def parse_judgement(self, text: str) -> JudgeScore:
        """The score (0 to 5) and reason in a judge's response. Raise `Rejection` if there is no such score; do not guess one."""
        # Two forms: `得分：4.5。理由`, which JUDGE requests, and the JSON object of querl's rubric judge,
        # {"综合得分": 4.5, "评分理由": "..."}.
        found = re.search(
            r'得分"?\s*[:：]\s*"?(\d+(?:\.\d+)?)"?[。.，,\s]*(?:"评分理由"\s*:\s*)?(.*)', text, re.DOTALL
        )
        if found is None or float(found[1]) > 5:
            raise Rejection("no_score", "the response holds no score from 0 to 5")
        return JudgeScore(float(found[1]), found[2].strip(' \t\n"}`'))


export(prompt=TenantPrompt)
